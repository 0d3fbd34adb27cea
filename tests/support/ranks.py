"""Run a test function on several real rank processes: ``run_ranks(fn, world_size, *args)``.

The processes are forked from one server that has imported torch already, and kept for the next call (importing torch
takes seconds). Every call gets a new process group and a new default context; after a failure, a timeout or a lost
rank, all processes of the call are killed and the next call gets fresh ones.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import faulthandler
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, Literal

from tests.support.needs import require_native

Transport = Literal["gloo", "shm", "shared"]
"""Process groups alone; shared memory alone, as compiled graphs have it; process groups whose ranks share memory."""
GRACE = 20.0
"""Seconds the other ranks have to report after the first one failed."""


class RankTestError(AssertionError):
    """A rank raised, died or did not end in time; the message holds its traceback."""


@dataclass
class Job:
    """What one rank is told to do."""

    module: str
    function: str
    path: list[str]
    arguments: tuple
    rank: int
    world_size: int
    degrees: dict[str, int]
    collectives: Transport
    rendezvous: str
    timeout: float
    comm_timeout: float
    stacks: str
    descriptors: list[str] = field(default_factory=list)
    """Names of the axes whose shared memory follows on the connection."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 600,
    collectives: Transport = "gloo",
    tp: int | None = None,
    pp: int = 1,
    cp: int = 1,
    comm_timeout: float = 120,
    lost: tuple[int, ...] = (),
    capacity: int | None = None,
    fresh: bool = False,
) -> list[Any]:
    """Call ``fn(*args)`` on ``world_size`` rank processes at once and return their results in rank order.

    Each rank has one thread, a seeded generator and a default ParallelContext of the given degrees (``tp`` defaults to
    what ``pp`` and ``cp`` leave). ``fn`` is a module-level function; arguments and results are pickled.
    ``comm_timeout``: seconds a collective waits for its peers. ``lost``: ranks that are expected to die or to stop;
    the call ends when all others have answered, and a lost rank's result is None. ``capacity``: bytes of a slot of
    shared memory. ``fresh``: in processes that have run nothing yet, for what depends on what was freed before.

    Raises RankTestError with the traceback of the rank that failed first, or, after ``timeout`` seconds (a guard
    against hanging), with the stack of every rank that has not answered.
    """
    degrees = {"tp": tp or world_size // (pp * cp), "pp": pp, "cp": cp}
    if collectives == "shm":
        require_native()
    workers = _pool.take(world_size, fresh)
    keep = False
    try:
        with tempfile.TemporaryDirectory(prefix="nxd-ranks-") as folder:
            deadline = time.monotonic() + timeout
            descriptors = _segments(world_size, degrees, capacity) if collectives == "shm" else {}
            try:
                for rank, worker in enumerate(workers):
                    mine = {axis: groups[rank] for axis, groups in descriptors.items()}
                    job = Job(
                        fn.__module__,
                        fn.__qualname__,
                        list(sys.path),
                        args,
                        rank,
                        world_size,
                        degrees,
                        collectives,
                        f"{folder}/store",
                        timeout,
                        comm_timeout,
                        f"{folder}/stack{rank}",
                        list(mine),
                    )
                    worker.submit(job, list(mine.values()))
            finally:
                for fd in {fd for groups in descriptors.values() for fd in groups}:
                    os.close(fd)
            results = _collect(workers, deadline, timeout, set(lost), folder)
        keep = not lost and not fresh
        return results
    finally:
        if keep:
            _pool.give_back(workers)
        else:
            for worker in workers:
                worker.kill()


def _segments(world_size: int, degrees: dict[str, int], capacity: int | None) -> dict[str, list[int]]:
    """For every axis of a degree above 1, the shared memory of each rank's group."""
    from nxd_infer.comm.shm import DEFAULT_CAPACITY, create_segment
    from nxd_infer.context import AXES, rank_layout

    layout = rank_layout(world_size, degrees["tp"], degrees["pp"], degrees["cp"])
    found: dict[str, list[int]] = {}
    for axis in AXES:
        if layout.degree(axis) > 1:
            of_rank = {}
            for group in layout.groups(axis):
                fd = create_segment(len(group), capacity or DEFAULT_CAPACITY)
                of_rank.update(dict.fromkeys(group, fd))
            found[axis] = [of_rank[rank] for rank in range(world_size)]
    return found


def _collect(workers: list[_Worker], deadline: float, timeout: float, lost: set[int], folder: str) -> list[Any]:
    waiting = {worker.connection: rank for rank, worker in enumerate(workers) if rank not in lost}
    results: list[Any] = [None] * len(workers)
    failures: list[str] = []
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = waiting.pop(connection)  # pyright: ignore[reportArgumentType]
            try:
                ok, value = workers[rank].receive()
            except (EOFError, OSError):
                workers[rank].process.join(120)
                ok, value = False, f"its process ended with status {workers[rank].process.exitcode}\n"
            if ok:
                results[rank] = value
            else:
                failures.append(f"rank {rank} of {len(workers)}: {value}")
                deadline = min(deadline, time.monotonic() + GRACE)
    if failures:
        silent = f"\n(no answer from ranks {sorted(waiting.values())})" if waiting else ""
        raise RankTestError("\n".join(failures) + silent)
    if waiting:
        stacks = []
        for rank in sorted(waiting.values()):
            stacks.append(f"rank {rank}:\n{workers[rank].stack(f'{folder}/stack{rank}')}")
        raise RankTestError(f"no answer within {timeout} s from ranks {sorted(waiting.values())}\n" + "\n".join(stacks))
    return results


class _Worker:
    """The parent's end of one rank process."""

    def __init__(self, context: Any):
        self.connection, theirs = context.Pipe(duplex=True)
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def submit(self, job: Job, descriptors: list[int]) -> None:
        self.connection.send_bytes(pickle.dumps(job.path))
        self.connection.send_bytes(pickle.dumps(job))
        for fd in descriptors:
            send_handle(self.connection, fd, self.process.pid)

    def receive(self) -> tuple[bool, Any]:
        return pickle.loads(self.connection.recv_bytes())

    def stack(self, file: str) -> str:
        """What the process is doing now, from its own fault handler."""
        with contextlib.suppress(OSError):
            os.kill(self.process.pid, signal.SIGUSR1)
        found, before, deadline = "", "", time.monotonic() + 20
        while (not found or found != before) and time.monotonic() < deadline:
            time.sleep(0.3)
            with contextlib.suppress(OSError), open(file) as handle:
                before, found = found, handle.read()
        return found or "(no stack)"

    def kill(self) -> None:
        """End the process and whatever it started."""
        if self.process.pid is not None and self.process.is_alive():
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            self.process.join(120)
        self.connection.close()


class _Pool:
    """Idle rank processes of this test session."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []
        self._owner = 0
        self._context: Any = None

    def take(self, count: int, fresh: bool) -> list[_Worker]:
        if self._owner != os.getpid():  # the first call, or a forked copy that must not share pipes
            self._owner, self._idle = os.getpid(), []
            self._context = multiprocessing.get_context("forkserver")
            # The last two are what any optimizer's first step imports, two seconds of each rank, and what most jobs do.
            self._context.set_forkserver_preload(
                ["torch", "torch.distributed", "tests.support.ranks", "nxd_infer.parallel_state", "torch._dynamo",
                 "nxd_infer.trainer"]
            )  # fmt: skip
            atexit.register(self.close)
        alive = [worker for worker in self._idle if worker.process.is_alive()]
        reused = 0 if fresh else count
        taken, self._idle = alive[:reused], alive[reused:]
        while len(taken) < count:
            taken.append(_Worker(self._context))
        return taken

    def give_back(self, workers: list[_Worker]) -> None:
        self._idle = workers + self._idle

    def close(self) -> None:
        if self._owner == os.getpid():
            while self._idle:
                self._idle.pop().kill()


_pool = _Pool()


# --- inside a rank ------------------------------------------------------------------------------------


def _serve(connection: Any) -> None:
    """Run jobs until the parent goes away."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the server, which dies with pytest
    os.setpgid(0, 0)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            sys.path[:] = pickle.loads(connection.recv_bytes())
            payload = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        try:
            answer = pickle.dumps((True, _run(pickle.loads(payload), connection)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)


def _run(job: Job, connection: Any) -> Any:
    import torch

    with open(job.stacks, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        torch.manual_seed(0)
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        segments = {axis: recv_handle(connection) for axis in job.descriptors}
        function: Any = importlib.import_module(job.module)
        for part in job.function.split("."):
            function = getattr(function, part)
        connect = _shm if job.collectives == "shm" else _gloo
        try:
            with connect(job, segments):
                return function(*job.arguments)
        finally:
            faulthandler.unregister(signal.SIGUSR1)
            gc.collect()


@contextlib.contextmanager
def _gloo(job: Job, segments: dict[str, int]):
    import torch.distributed as dist

    from nxd_infer import parallel_state

    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.rendezvous}",
        rank=job.rank,
        world_size=job.world_size,
        timeout=datetime.timedelta(seconds=job.timeout),
    )
    parallel_state.initialize_model_parallel(
        job.degrees["tp"],
        job.degrees["pp"],
        context_parallel_size=job.degrees["cp"],
        timeout=job.comm_timeout,
        shared_memory=job.collectives == "shared",
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _meet(job: Job) -> None:
    """Wait for the other ranks: how much later one of them begins is no part of what its collectives may wait."""
    Path(f"{job.rendezvous}{job.rank}").touch()
    end = time.monotonic() + job.timeout
    while not all(os.path.exists(f"{job.rendezvous}{rank}") for rank in range(job.world_size)):
        assert time.monotonic() < end, "another rank has not begun"
        time.sleep(0.001)


@contextlib.contextmanager
def _shm(job: Job, segments: dict[str, int]):
    from nxd_infer import native
    from nxd_infer.comm.protocol import register_collectives, unregister_collectives
    from nxd_infer.comm.shm import ShmCollectives
    from nxd_infer.context import make_context, set_default_context

    _meet(job)
    context = make_context(job.world_size, job.rank, **job.degrees, collectives="shm")
    register_collectives("shm", ShmCollectives(native.load(), context, segments, timeout=job.comm_timeout))
    set_default_context(context)
    try:
        yield
    finally:
        set_default_context(None)
        unregister_collectives("shm")
        for fd in segments.values():
            os.close(fd)
