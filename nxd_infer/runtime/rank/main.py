"""A rank process: ``python -m nxd_infer.runtime.rank.main rank N --config JSON``. Started by the supervisor only.

It dies with its parent (PDEATHSIG), keeps to its cores and threads, imports what it needs, and then waits for records:
read one, run, write the outputs (rank 0), answer. The first one has it load its rank of the artifact, whose files have
been verified by then. It never unpickles anything.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from nxd_infer.comm import Collectives
    from nxd_infer.context import ParallelContext
    from nxd_infer.runtime.rank.rank import Rank
    from nxd_infer.runtime.ranks.arena import Arena
    from nxd_infer.runtime.ranks.channel import Kind


@dataclass(frozen=True)
class WorkerConfig:
    """What the supervisor tells a rank, as JSON on the command line."""

    artifact: str
    digest: str
    rank: int
    """Which rank this process is, or 0 where it runs all of them."""
    degree: int
    together: bool
    """Whether this process runs all ranks."""
    parent: int
    socket: int
    arena: int
    threads: int
    cores: list[int]
    crew: bool
    """Whether operators share work among threads of their own, one on each of ``cores``."""
    timeout: float
    libraries: list[tuple[str, int]]
    """Native libraries to connect, each with the descriptor of its shared memory; the first is the transport of
    operators that are not compiled into a graph."""
    rendezvous: str
    """File through which ranks without a native library find each other (gloo)."""

    def to_json(self) -> str:
        return json.dumps(self.__dict__)

    @classmethod
    def from_json(cls, text: str) -> WorkerConfig:
        return cls(**json.loads(text))


def main(arguments: list[str]) -> int:
    from nxd_infer.util.processes import die_with_parent, name_process

    config = WorkerConfig.from_json(arguments[arguments.index("--config") + 1])
    die_with_parent(config.parent)
    name_process(f"nxd rank {config.rank}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    # Without cores: where the caller's process may be, though the thread that has started this one may keep to fewer.
    os.sched_setaffinity(0, config.cores or os.sched_getaffinity(config.parent))
    if config.crew:
        _settle_openmp(config.cores)

    gc.disable()  # what is imported stays: to look through it again and again takes an eighth of the import
    import torch

    from nxd_infer.runtime.ranks.arena import Arena
    from nxd_infer.runtime.ranks.channel import Channel, Kind

    torch.set_num_threads(config.threads)
    if config.crew:
        os.sched_setaffinity(0, config.cores[:1])
    channel = Channel.from_fd(config.socket)
    message = channel.receive_request()
    if message is None:
        return 0
    request, fds = message
    started = time.monotonic_ns()
    try:
        for fd in fds[1:]:
            os.close(fd)
        rank = load_rank(config, fds[0])
        arena = Arena(config.arena, rank.artifact.manifest, writable_inputs=False)
    except BaseException:
        channel.send_response(request, time.monotonic_ns() - started, traceback.format_exc())
        channel.receive_request()  # stay until the caller has read it: an end would look like the cause
        return 1
    gc.freeze()
    gc.enable()
    channel.send_response(request, time.monotonic_ns() - started)
    steps = _Steps(rank, arena)
    while (message := channel.receive_request()) is not None:
        request, fds = message
        if request.kind == Kind.STOP:
            break
        started = time.monotonic_ns()
        error = None
        arena.begin(config.rank, started)
        try:
            if request.kind == Kind.STEP:
                steps.run(request.side, request.bucket)
            else:
                _serve(request.kind, fds, rank)
        except BaseException:
            error = traceback.format_exc()
        arena.finish(config.rank)
        channel.send_response(request, time.monotonic_ns() - started, error)
    return 0


class _Steps:
    """Runs steps over the arena: from a side's inputs to its outputs, which rank 0 writes."""

    def __init__(self, rank: Rank, arena: Arena):
        self._rank, self._arena = rank, arena
        self._bound: dict[tuple[int, int], Callable[[], list[Tensor]]] = {}
        self._places: dict[tuple[int, int], list[tuple[Tensor, int, int]]] = {}
        self._failed = False

    def run(self, side: int, bucket: int) -> None:
        if self._failed:  # the others may still be in that step, and would take this one's collectives for its own
            raise RuntimeError("an earlier step of this rank has raised")
        self._failed = True
        self._run(side, bucket)
        self._failed = False

    def _run(self, side: int, bucket: int) -> None:
        run = self._bound.get((side, bucket))
        if run is None:
            run = self._bound[side, bucket] = self._rank.bind(bucket, self._arena.sides[side].inputs[bucket])
        outputs = run()
        if self._rank.rank == 0:
            for (view, address, size), output in zip(self._outputs(side, bucket), outputs, strict=True):
                if output.is_contiguous() and not (output.is_conj() or output.is_neg()):
                    ctypes.memmove(address, output.data_ptr(), size)  # 20 microseconds less than copy_, four times
                else:
                    view.copy_(output)

    def _outputs(self, side: int, bucket: int) -> list[tuple[Tensor, int, int]]:
        """Where each output goes: the arena's tensor, its address and bytes."""
        found = self._places.get((side, bucket))
        if found is None:
            views = self._arena.sides[side].outputs[bucket]
            found = self._places[side, bucket] = [(view, view.data_ptr(), view.nbytes) for view in views]
        return found


def _settle_openmp(cores: list[int]) -> None:
    """OpenMP runs the larger loops of a compiled graph, on the cores of the operators' crew. Before torch is imported.

    Its threads keep to a core each, the first of them to the first core, which the engine leaves alone; and they wait
    asleep: one that waits awake, as they do by default for some milliseconds, takes half a core from the crew.
    """
    for name in ("OMP_PLACES", "OMP_PROC_BIND"):  # they would go before the next
        os.environ.pop(name, None)
    os.environ["GOMP_CPU_AFFINITY"] = " ".join(map(str, cores))
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # some 100 microseconds


def _serve(kind: Kind, fds: list[int], rank: Rank) -> None:
    """Anything but a step."""
    from nxd_infer.runtime.ranks.channel import Kind

    if kind == Kind.RESET:
        rank.reset_states()
    elif kind in (Kind.ROUTE, Kind.PREPARE_WEIGHTS):
        try:
            if kind == Kind.ROUTE:
                rank.route(fds[0])
            else:
                rank.prepare_weights([f"/proc/self/fd/{fd}" for fd in fds])
        finally:
            for fd in fds:
                os.close(fd)
    elif kind == Kind.COMMIT_WEIGHTS:
        rank.commit_weights()
    elif kind == Kind.ABORT_WEIGHTS:
        rank.abort_weights()


def load_rank(config: WorkerConfig, stamps: int) -> Rank:
    """This process's rank: its context and transport, then its weights, states and graphs. ``stamps``: a descriptor of
    those of the files that the caller has verified."""
    from nxd_infer.artifact.verified import read_stamps
    from nxd_infer.context import make_context, set_default_context
    from nxd_infer.runtime.load import load_artifact
    from nxd_infer.runtime.rank.rank import Rank, Runtime

    # The caller verified the contents; a digest that differs means the directory was replaced since.
    artifact = load_artifact(config.artifact, verify=False)
    artifact.stamps.update(read_stamps(stamps))
    os.close(stamps)
    if artifact.digest != config.digest:
        from nxd_infer.errors import ArtifactCorruptError

        raise ArtifactCorruptError(f"the artifact {config.artifact} was replaced while it was loaded; load it again")
    for each in range(config.degree) if config.together else [config.rank]:
        artifact.verify_again(each)  # before any of its code runs
    key = "ranks" if config.degree > 1 else "local"
    context = make_context(config.degree, config.rank, tp=config.degree, collectives=key)
    set_default_context(context)
    if config.degree > 1 and not config.together:
        connect(config, context)
    runtime = Runtime(context, config.threads, artifact)
    rank = Rank(artifact, config.rank, runtime)
    if config.crew:
        runtime.engage_crews(config.cores)
    return rank


def connect(config: WorkerConfig, context: ParallelContext) -> None:
    """Register this rank's transport: shared memory, or gloo where there is no native library."""
    from nxd_infer.comm import register_collectives

    if not config.libraries:
        register_collectives(context.collectives, _gloo(config, context))
        return
    from nxd_infer import native
    from nxd_infer.comm.shm import ShmCollectives

    transports = [
        ShmCollectives(native.load_file(path), context, {"tp": segment}, timeout=config.timeout)
        for path, segment in config.libraries
    ]
    register_collectives(context.collectives, transports[0])


def _gloo(config: WorkerConfig, context: ParallelContext) -> Collectives:
    import datetime

    import torch.distributed as dist
    from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]  (documented, not in __all__)

    from nxd_infer.comm.distributed import DistributedCollectives

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host
    dist.init_process_group(
        "gloo",
        store=FileStore(config.rendezvous, config.degree),
        rank=config.rank,
        world_size=config.degree,
        timeout=datetime.timedelta(seconds=config.timeout),
    )
    groups = {"tp": dist.distributed_c10d._get_default_group()}
    return DistributedCollectives(context, groups, config.timeout)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing to tidy: states end with the process, and torch's exit handlers can hang on a dead peer
