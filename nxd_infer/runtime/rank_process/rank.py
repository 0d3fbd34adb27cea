"""The part of an artifact that one process runs (one rank, or all if the backend says so), and a rank process's loop:
load that part, then answer requests until the caller is gone."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxd_infer import native
from nxd_infer.artifact.manifest import StageSpec, TensorSpec
from nxd_infer.artifact.rank_weights import load_entries, load_weights
from nxd_infer.artifact.reader import LoadedArtifact
from nxd_infer.artifact.verified import read_stamps
from nxd_infer.backends import registry
from nxd_infer.backends.base import Executable, RankGraph
from nxd_infer.comm import register_collectives
from nxd_infer.comm.distributed import join_on_this_host
from nxd_infer.comm.shm import ShmCollectives
from nxd_infer.context import ParallelContext, make_context, set_default_context
from nxd_infer.errors import ArtifactCorruptError, InputMismatchError, ModelClosedError, WeightSchemaError
from nxd_infer.runtime.bucket_kernel import answer, load_kernel
from nxd_infer.runtime.ipc import Arena, Channel, Handover, Kind
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.rank_process.config import RankConfig
from nxd_infer.util.memory import keep_much


@dataclass
class Runtime:
    """The services of this process for the graphs it loads (``backends.RankRuntime``)."""

    context: ParallelContext
    threads: int
    artifact: LoadedArtifact
    _libraries: dict[str, Any] = field(default_factory=dict)

    def library(self, content_hash: str) -> Any:
        """Return the artifact's operator library ``ops/<hash>.so``, registered once in this process.

        A rank process connects it to its peers before any graph is loaded.
        """
        if content_hash not in self._libraries:
            self._libraries[content_hash] = native.load_file(self.artifact.op_file(content_hash))
        return self._libraries[content_hash]

    def engage_crews(self, cores: Sequence[int]) -> None:
        """Let the operators of the libraries loaded so far share work among their own threads, one per core."""
        for library in self._libraries.values():
            library.engage_crew(self.threads, cores)


class Rank:
    """The tensors and graphs of rank ``rank`` of an artifact, or of all its ranks. The caller has verified its files
    (``verify_again``)."""

    def __init__(self, artifact: LoadedArtifact, rank: int, runtime: Runtime):
        self.artifact = artifact
        self.rank = rank
        self._manifest = manifest = artifact.manifest.of_rank(rank)
        self.tp_rank = rank % manifest.tp_degree
        backend = registry.get(manifest.backend)
        self.ranks = range(manifest.tp_degree) if backend.one_process else range(rank, rank + 1)
        self._places = [backend.place(manifest, artifact.weight_file(each), runtime) for each in self.ranks]
        loaded: dict[tuple[str, ...], Executable] = {}
        self._buckets: list[Executable] = []
        for bucket in manifest.buckets:
            digests = tuple(bucket.graphs[each] for each in self.ranks)
            if digests not in loaded:
                graphs = [
                    RankGraph(artifact.graph_dir(digest), manifest.graphs[digest], place.states, place.weights)
                    for digest, place in zip(digests, self._places, strict=True)
                ]
                loaded[digests] = backend.load(graphs, runtime)
            self._buckets.append(loaded[digests])
        self._graphs = list(loaded.values())
        self._kernel = load_kernel(artifact) if rank == 0 else None
        self._staged: list[_Staged] = []
        self._broken = ""

    def stage(self, bucket: int) -> StageSpec:
        """Return what the rank's graph of a bucket takes after the inputs, and what it gives."""
        spec = self._manifest.buckets[bucket]
        if spec.stages:
            return spec.stages[self.rank // self._manifest.tp_degree]
        return StageSpec(gives=[output.name for output in spec.outputs])

    def bind(self, bucket: int, inputs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Return a function that runs steps of bucket number ``bucket`` on these tensors, in the manifest's order, as
        its results are. They are checked now, and results at the first step, because a decoding rank has only a few
        hundred microseconds between two steps, as much as the check takes."""
        graph = self._buckets[bucket].bind(inputs)
        known = self.artifact.manifest.buckets[bucket]
        named = {spec.name: spec for spec in (*known.outputs, *known.handed)}
        specs = [named[name] for name in self.stage(bucket).gives]
        checked = False

        def step() -> list[Tensor]:
            nonlocal checked
            if self._broken:
                raise ModelClosedError(self._broken)
            outputs = graph()
            if not checked:
                _check_outputs(outputs, specs)
                checked = True
            return outputs

        return step

    def serve(self, kind: Kind, fds: Sequence[int]) -> None:
        """Handle any request except a step; ``fds`` are its descriptors, which the caller closes."""
        if kind == Kind.RESET:
            for place in self._places:
                place.reset_states()
        elif kind == Kind.ROUTE and self._kernel is not None:  # on rank 0 only
            answer(self._kernel, fds[0])
        elif kind == Kind.PREPARE_WEIGHTS:
            self.prepare_weights([f"/proc/self/fd/{fd}" for fd in fds])
        elif kind == Kind.COMMIT_WEIGHTS:
            self.commit_weights()
        elif kind == Kind.ABORT_WEIGHTS:
            self.abort_weights()

    def prepare_weights(self, files: Sequence[str | os.PathLike[str]]) -> None:
        """Map new weights, one file per rank, check them and read them from disk, without using them yet. Raises
        WeightSchemaError."""
        self.abort_weights()
        specs = self._manifest.weights
        encoded = {spec.name for spec in specs if spec.encoding}
        for file in files:
            try:
                new = load_weights(Path(file), specs, partial=True)
                entries = load_entries(Path(file), specs)
            except ArtifactCorruptError as error:
                raise WeightSchemaError(str(error)) from error
            plain = {name: tensor for name, tensor in new.items() if name not in encoded}
            for tensor in plain.values():  # read it now, with the time limit of a start, not of the next call
                if tensor.is_contiguous() and tensor.numel() > 0:  # others were copied from their file
                    tensor.view(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()
            self._staged.append(_Staged(plain, list(new), entries, os.open(file, os.O_RDONLY | os.O_CLOEXEC)))

    def commit_weights(self) -> None:
        """Use the prepared weights from the next step on."""
        if not self._staged:
            raise WeightSchemaError("no new weights were prepared")
        staged, self._staged = self._staged, []
        try:
            for place, (number, new) in zip(self._places, enumerate(staged), strict=True):
                moved = place.replace_weights(new.names, self._reader(new))
                for graph in self._graphs:
                    own = {weight.name for weight in graph.graph.weights} & moved.keys()
                    if own:
                        graph.update_weights({name: moved[name] for name in own}, number)
                for (name, slot), entry in new.entries.items():
                    place.replace_entry(name, slot, entry)
        except BaseException as error:
            self._broken = f"new weights replaced only some of the old ones ({error}); restart the model"
            raise
        finally:
            for new in staged:
                os.close(new.fd)

    def _reader(self, new: _Staged) -> Callable[[str], Tensor]:
        """Return a reader of the new weights. Encoded ones are read one by one, and their pages released at once."""
        source = Path(f"/proc/self/fd/{new.fd}")
        specs = {spec.name: spec for spec in self._manifest.weights}

        def read(name: str) -> Tensor:
            return new.tensors[name] if name in new.tensors else load_weights(source, [specs[name]])[name]

        return read

    def abort_weights(self) -> None:
        for new in self._staged:
            os.close(new.fd)
        self._staged = []

    def close(self) -> None:
        for graph in self._graphs:
            graph.close()
        self.abort_weights()
        for place in self._places:
            place.close()


def _check_outputs(outputs: Sequence[Tensor], specs: Sequence[TensorSpec]) -> None:
    if len(outputs) != len(specs):
        raise InputMismatchError(f"the graph returned {len(outputs)} outputs, the manifest names {len(specs)}")
    for spec, output in zip(specs, outputs, strict=True):
        if list(output.shape) != spec.shape or output.dtype != spec.torch_dtype:
            raise InputMismatchError(
                f"the graph returned {output.dtype}{list(output.shape)} for output {spec.name!r}, "
                f"traced as {spec.dtype}{spec.shape}"
            )


@dataclass
class _Staged:
    """One rank's new weights, checked: the plain ones mapped, the names of all, entries of adapter tables by table and
    slot, and their open file."""

    tensors: dict[str, Tensor]
    names: list[str]
    entries: dict[tuple[str, int], Tensor]
    fd: int


_Place = tuple[Tensor, int, int]
"""A tensor of the arena, its address and its size."""


def run(config: RankConfig) -> int:
    """Run the rank of ``config``; return the exit status."""
    keep_much()
    if config.crew:
        os.sched_setaffinity(0, config.cores[:1])
    torch.set_num_threads(config.threads)
    channel = Channel(socket.socket(fileno=config.socket))
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
        channel.receive_request()  # stay until the caller has read the answer, else this exit would look like the cause
        return 1
    gc.freeze()
    gc.enable()
    channel.send_response(request, time.monotonic_ns() - started)
    steps = _ArenaSteps(rank, arena, Handover(config.after, config.before, config.timeout))
    while (message := channel.receive_request()) is not None:
        request, fds = message
        started = time.monotonic_ns()
        error, waited = None, 0
        arena.begin(config.rank, started)
        try:
            if request.kind == Kind.STEP:
                waited = steps.run(request.side, request.bucket)
            else:
                rank.serve(request.kind, fds)
        except BaseException:
            error = traceback.format_exc()
        for fd in fds:
            os.close(fd)
        took = time.monotonic_ns() - started - waited
        arena.finish(config.rank, took)
        channel.send_response(request, took, error)
    return 0


class _ArenaSteps:
    """Runs steps in the arena: from a side's inputs to its outputs, which the first rank of a stage writes."""

    def __init__(self, rank: Rank, arena: Arena, handover: Handover):
        self._rank, self._arena, self._handover = rank, arena, handover
        self._prepared: dict[tuple[int, int], tuple[Callable[[], list[Tensor]], list[_Place | None]]] = {}
        self._failed = False

    def run(self, side: int, bucket: int) -> int:
        """Run a step; return the nanoseconds that it waited for the stage before."""
        if self._failed:  # other ranks may still be in that step, and would mix up the collectives
            raise RuntimeError("an earlier step of this rank has raised")
        self._failed = True
        if (side, bucket) not in self._prepared:
            self._prepared[side, bucket] = self._prepare(side, bucket)
        run, places = self._prepared[side, bucket]
        waited = self._handover.wait()
        for place, output in zip(places, run(), strict=True):
            if place is None:
                continue
            view, address, size = place
            if output.is_contiguous() and not (output.is_conj() or output.is_neg()):
                ctypes.memmove(address, output.data_ptr(), size)  # 20 microseconds less than copy_, four times
            else:
                view.copy_(output)
        self._handover.done()
        self._failed = False
        return waited

    def _prepare(self, side: int, bucket: int) -> tuple[Callable[[], list[Tensor]], list[_Place | None]]:
        """Return what runs a step, and the place of each result; None for an output that another rank writes."""
        spec, stage = self._rank.artifact.manifest.buckets[bucket], self._rank.stage(bucket)
        arena, own = self._arena.sides[side], self._rank.tp_rank

        def handed(writable: bool) -> dict[str, Tensor]:
            tensors = self._arena.handed(side, own, writable=writable)[bucket]
            return {one.name: tensor for one, tensor in zip(spec.handed, tensors, strict=True)}

        taken, views = handed(False), handed(True)
        if own == 0:
            views.update((one.name, view) for one, view in zip(spec.outputs, arena.outputs[bucket], strict=True))
        run = self._rank.bind(bucket, [*arena.inputs[bucket], *(taken[name] for name in stage.takes)])
        results = [views.get(name) for name in stage.gives]
        return run, [None if view is None else (view, view.data_ptr(), view.nbytes) for view in results]


def load_rank(config: RankConfig, stamps: int) -> Rank:
    """Create this process's rank: its context and transport, then its weights, states and graphs. ``stamps``: the
    descriptor of the stamps of the files that the caller has verified."""
    # The caller verified the contents; a different digest means that the directory was replaced since.
    artifact = load_artifact(config.artifact, verify=False)
    artifact.stamps.update(read_stamps(stamps))
    os.close(stamps)
    if artifact.digest != config.digest:
        raise ArtifactCorruptError(f"the artifact {config.artifact} was replaced while it was loaded; load it again")
    for each in range(config.degree) if config.together else [config.rank]:
        artifact.verify_again(each)  # before any of its code runs
    tp, pp = artifact.manifest.tp_degree, artifact.manifest.pp_degree
    key = "ranks" if tp > 1 else "local"
    context = make_context(tp * pp, config.rank, tp=tp, pp=pp, collectives=key)
    set_default_context(context)
    if tp > 1 and not config.together:
        connect(config, context)
    runtime = Runtime(context, config.threads, artifact)
    rank = Rank(artifact, config.rank, runtime)
    if config.crew:
        runtime.engage_crews(config.cores)
    return rank


def connect(config: RankConfig, context: ParallelContext) -> None:
    """Register this rank's transport: shared memory, or gloo if there is no native library."""
    if not config.libraries:
        stage = make_context(context.tp.degree, context.tp.rank, tp=context.tp.degree)
        file = f"{config.rendezvous}-{context.pp.rank}"
        register_collectives(context.collectives, join_on_this_host(stage, file, config.timeout))
        return
    transports = [
        ShmCollectives(native.load_file(path), context, {"tp": segment}, timeout=config.timeout)
        for path, segment in config.libraries
    ]
    register_collectives(context.collectives, transports[0])
