"""Run a test function on several real rank processes, which are forked from a process that has imported torch."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import importlib
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace as Job
from typing import Any, Literal

from nxd_infer.processes.child import end_all
from nxd_infer.processes.command import environment_of_caller, python_of_caller
from nxd_infer.processes.own import leave
from nxd_infer.processes.start import start
from tests.support.needs import require_native

GRACE = 20.0
"""Seconds the other ranks have to report after the first one failed."""


class RankTestError(AssertionError):
    """A rank raised, died or did not end in time; the message holds its traceback."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 600,
    collectives: Literal["gloo", "shm", "shared"] = "gloo",
    tp: int | None = None,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    comm_timeout: float = 120,
    lost: tuple[int, ...] = (),
    capacity: int | None = None,
) -> list[Any]:
    """Call ``fn(*args)`` on ``world_size`` rank processes at once and return their results in rank order.

    Each rank has one thread, a seeded generator and a default ParallelContext of the given degrees (``tp`` defaults to
    what ``pp`` and ``cp`` leave). ``fn`` is a module-level function; arguments and results are pickled.
    ``collectives``: of process groups, of shared memory as compiled graphs have it, of groups that share memory.
    ``comm_timeout``: seconds a collective waits for its peers. ``lost``: ranks that are expected to die or to stop;
    the call ends when all others have answered, and a lost rank's result is None. ``capacity``: bytes of a slot of
    shared memory.

    Raises RankTestError with the traceback of the rank that failed first, or, after ``timeout`` seconds (a guard
    against hanging), with the stack of every rank that has not answered.
    """
    degrees = {"tp": tp or world_size // (pp * cp), "pp": pp, "cp": cp, "ep": ep}
    if collectives == "shm":
        require_native()
    workers: list[_Worker] = []
    try:
        with tempfile.TemporaryDirectory(prefix="nxd-ranks-") as folder, contextlib.ExitStack() as opened:
            deadline = time.monotonic() + timeout
            segments = _segments(world_size, degrees, capacity, opened) if collectives == "shm" else [{}] * world_size
            for rank in range(world_size):
                workers.append(_Worker())
                workers[rank].submit(
                    Job(
                        module=fn.__module__,
                        function=fn.__qualname__,
                        arguments=args,
                        rank=rank,
                        world_size=world_size,
                        degrees=degrees,
                        collectives=collectives,
                        rendezvous=f"{folder}/store",
                        timeout=timeout,
                        comm_timeout=comm_timeout,
                        stacks=f"{folder}/stack{rank}",
                        segments=segments[rank],
                    )
                )
            return _collect(workers, deadline, timeout, set(lost), folder)
    finally:
        end_all([worker.process for worker in workers])


def _segments(
    world_size: int, degrees: dict[str, int], capacity: int | None, opened: contextlib.ExitStack
) -> list[dict[str, str]]:
    """For each rank, the shared memory of its groups: of every axis of a degree above 1. ``opened`` closes it."""
    from nxd_infer.comm.shm import DEFAULT_CAPACITY, create_segment
    from nxd_infer.context import AXES, rank_layout

    layout = rank_layout(world_size, degrees["tp"], degrees["pp"], degrees["cp"])
    found: list[dict[str, str]] = [{} for _ in range(world_size)]
    for axis in AXES:
        for group in layout.groups(axis) if layout.degree(axis) > 1 else []:
            fd = create_segment(len(group), capacity or DEFAULT_CAPACITY)
            opened.callback(os.close, fd)
            for rank in group:
                found[rank][axis] = f"/proc/{os.getpid()}/fd/{fd}"
    return found


def _collect(workers: list[_Worker], deadline: float, timeout: float, lost: set[int], folder: str) -> list[Any]:
    waiting = {worker.connection: rank for rank, worker in enumerate(workers) if rank not in lost}
    results: list[Any] = [None] * len(workers)
    failures: list[str] = []
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = waiting.pop(connection)  # pyright: ignore[reportArgumentType]
            try:
                ok, value = workers[rank].receive()
            except (EOFError, OSError):
                workers[rank].process.wait(120)
                ok, value = False, f"its process {workers[rank].process.explain()}\n"
            if ok:
                results[rank] = value
            else:
                failures.append(f"rank {rank} of {len(workers)}: {value}")
                deadline = min(deadline, time.monotonic() + GRACE)
    if failures:
        silent = f"\n(no answer from ranks {sorted(waiting.values())})" if waiting else ""
        raise RankTestError("\n".join(failures) + silent)
    if waiting:
        time.sleep(1)  # each writes its stack after the same time
        silent = sorted(waiting.values())
        stacks = [f"rank {rank}:\n{Path(f'{folder}/stack{rank}').read_text()}" for rank in silent]
        raise RankTestError(f"no answer within {timeout} s from ranks {silent}\n" + "\n".join(stacks))
    return results


_RANK = "from tests.support.ranks import serve; serve(int(sys.argv[1]))"
_environment = functools.cache(environment_of_caller)


class _Worker:
    def __init__(self) -> None:
        self.connection, remote = multiprocessing.Pipe()
        with remote:
            self.process = start(
                python_of_caller(_RANK, str(remote.fileno())),
                imports="tests.support.rank_imports",
                importing=_environment(),
                environment={"GLOO_SOCKET_IFNAME": "lo", **_environment()},
                check=lambda: None,  # a test has a time limit
                inherit=[remote.fileno()],
            )

    def submit(self, job: Job) -> None:
        self.connection.send_bytes(pickle.dumps(job))

    def receive(self) -> tuple[bool, Any]:
        return pickle.loads(self.connection.recv_bytes())


def serve(descriptor: int) -> None:
    """Do the job that comes from this descriptor."""
    connection = Connection(descriptor)
    job = pickle.loads(connection.recv_bytes())
    try:
        answer = pickle.dumps((True, _run(job)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    connection.send_bytes(answer)
    leave(0)


def _run(job: Job) -> Any:
    import torch

    with open(job.stacks, "w") as stacks:
        faulthandler.dump_traceback_later(job.timeout, file=stacks)
        torch.manual_seed(0)
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        function: Any = importlib.import_module(job.module)
        for part in job.function.split("."):
            function = getattr(function, part)
        try:
            with (_shm if job.collectives == "shm" else _gloo)(job):
                return function(*job.arguments)
        finally:
            faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _gloo(job: Job):
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
        expert_model_parallel_size=job.degrees["ep"],
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
def _shm(job: Job):
    from nxd_infer import native
    from nxd_infer.comm.protocol import register_collectives, unregister_collectives
    from nxd_infer.comm.shm import ShmCollectives
    from nxd_infer.context import make_context, set_default_context

    segments = {axis: os.open(path, os.O_RDWR | os.O_CLOEXEC) for axis, path in job.segments.items()}
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
