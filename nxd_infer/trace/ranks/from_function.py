"""Func mode: one process per rank runs the user's function on real weights, exports, and writes its results.

Without ``max_parallel_compilations`` all ranks run at once, joined by gloo, so that ``func`` may use collectives.
With a smaller number they run in turns (func, export and writing together), so that no more than that many hold
weights at a time; then a collective inside ``func`` would wait for a rank that has not started, and is an error.

Every wait is bounded; whatever ends the trace ends the processes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from nxd_infer import compat, errors
from nxd_infer.errors import CollectiveError, TraceConfigError, TraceError
from nxd_infer.processes import command
from nxd_infer.processes.child import END_SECONDS, ChildProcess
from nxd_infer.processes.command import environment_of_caller, preparation, python_of_caller
from nxd_infer.processes.start import start
from nxd_infer.trace.ranks.traced import TracedRank
from nxd_infer.trace.request import TraceRequest
from nxd_infer.util.ports import free_port

REQUEST_FILE = "request.pickle"
"""File with the request in the trace's private directory. Read late enough for a rank to report unpickling errors."""
GRACE = 1.0
"""Seconds for other ranks to report after the first failure, so that the cause is shown and not a consequence."""


# --- what a rank process is told, and tells: "func", each bucket's index, and at last its stages or its failure -------


@dataclass
class RankSettings:
    """The settings of a rank process besides the request."""

    rank: int
    degree: int
    pp_degree: int
    at_once: int
    """How many ranks run at a time; if all do, they are joined by gloo."""
    build: Path
    port: int
    """``MASTER_PORT`` of code in ``func``; the ranks themselves meet in a file."""
    parent: int
    preparation: dict[str, Any]
    """The caller's script, arguments and directory, for ``import_script``."""
    compat: bool
    """Whether the caller's script imports this package as ``neuronx_distributed``."""
    timeout: float


@dataclass(frozen=True)
class Failure:
    """Why a rank has failed."""

    rank: int
    kind: str
    """The class of its error; "" if it ended without a word."""
    text: str
    traceback: str = ""

    @property
    def type(self) -> type:
        named = getattr(errors, self.kind, None)
        return named if isinstance(named, type) else Exception


# --- the request as bytes -----------------------------------------------------------------------------


def pack(request: TraceRequest) -> bytes:
    """Pickle the request for another process. Raises TraceConfigError if a new process could not import ``func``."""
    request = request.for_ranks()
    reason = _unimportable(request.options.func)
    if reason is None:
        try:
            return pickle.dumps(request)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            reason = f"it, or an argument given with it, cannot be pickled ({error})"
    if importlib.util.find_spec("cloudpickle") is not None:
        import cloudpickle

        try:
            return cloudpickle.dumps(request)
        except Exception as error:
            raise TraceConfigError(f"func cannot be sent to the rank processes: {error}") from error
    raise TraceConfigError(
        f"func cannot be sent to the rank processes: {reason}. Each rank is a new process that imports func by name: "
        "define it at the top level of a module (and guard the script with `if __name__ == '__main__':`), or install "
        "cloudpickle"
    )


def _unimportable(func: Callable[..., Any]) -> str | None:
    """Return why a spawned process could not import ``func`` by its name, or None."""
    name = getattr(func, "__qualname__", "")
    if "<lambda>" in name:
        return "it is a lambda"
    if "<locals>" in name:
        return f"{name} is defined inside another function"
    if getattr(func, "__module__", None) == "__main__":
        main = sys.modules["__main__"]
        file = getattr(main, "__file__", None)
        if getattr(main, "__spec__", None) is None and (file is None or not os.path.exists(file)):
            return "it is defined in an interactive session or on standard input"
    return None


# --- the parent ---------------------------------------------------------------------------------------


@dataclass
class _Rank:
    settings: RankSettings
    process: ChildProcess
    connection: Any
    """The parent's end of the rank's pipe."""
    place: str = "starting"

    def receive(self) -> Any:
        """Return its next message; a failure in place of a dead rank's."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self.process.wait(END_SECONDS)
        ended = f"the process of rank {self.settings.rank} {self.process.explain()}"
        if self.place == "starting":
            return Failure(self.settings.rank, "", f"{ended} before func ran; what it printed is above")
        killed = self.process.returncode == -signal.SIGKILL
        hint = "; it may have run out of memory: try max_parallel_compilations=1" if killed else ""
        return Failure(self.settings.rank, "", f"{ended} while tracing ({self.place}){hint}")

    def end(self, patience: float = 0.0) -> None:
        self.process.end(patience)
        self.connection.close()


def trace_ranks(request: TraceRequest, build: Path) -> list[TracedRank]:
    """Trace every rank in its own process; return results in rank order.

    Raises TraceError with the rank and its traceback (TraceConfigError if that is what the rank raised).
    """
    if command.importing_script:
        raise TraceConfigError(
            "the script calls parallel_model_trace at its top level, and every rank process imports the script: put "
            "the call under `if __name__ == '__main__':`"
        )
    # A file instead of a message: a pipe holds little, and writing would wait for a rank that may never read.
    (build / REQUEST_FILE).write_bytes(pack(request))
    options, progress = request.options, request.options.report
    degree = options.tp_degree
    deadline = time.monotonic() + options.trace_timeout
    settings = RankSettings(
        rank=0,
        degree=degree,
        pp_degree=options.pp_degree,
        at_once=min(degree, options.max_parallel_compilations or degree),
        build=build,
        port=free_port(),
        parent=os.getpid(),
        preparation=preparation(),
        compat=compat.is_installed(),
        timeout=options.trace_timeout,
    )
    results: list[TracedRank] = []
    failures: list[Failure] = []
    waiting, running = list(range(degree)), list[_Rank]()
    total = degree * len(request.buckets)
    done = 0
    progress("trace ranks", 0, total, "")
    try:
        while running or (waiting and not failures):
            while waiting and len(running) < settings.at_once and not failures:
                running.append(_start(replace(settings, rank=waiting.pop(0)), deadline))
            ready = wait([rank.connection for rank in running], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank in running if rank.connection in ready]:
                message = rank.receive()
                if isinstance(message, str):
                    rank.place = message
                elif isinstance(message, int):
                    rank.place = request.buckets[message].name
                    done += 1
                    progress("trace ranks", min(done, total), total, f"rank {rank.settings.rank}: {rank.place}")
                else:
                    if isinstance(message, Failure):
                        failures.append(message)
                        deadline = min(deadline, time.monotonic() + GRACE)
                    else:
                        results += message
                    running.remove(rank)
                    rank.end(patience=10)
        if failures:
            raise error_of(failures)
        if running:
            raise _late(", ".join(f"rank {rank.settings.rank} ({rank.place})" for rank in running))
    finally:
        for rank in running:
            rank.end()
    progress("trace ranks", total, total, "")
    return sorted(results, key=lambda result: result.rank)


_RANK = """
from nxd_infer.trace.ranks.process_main import main
main(int(sys.argv[1]))
"""


def _start(settings: RankSettings, deadline: float) -> _Rank:
    def check() -> None:
        if time.monotonic() > deadline:
            raise _late(f"rank {settings.rank} (starting)")

    ours, remote = Pipe()
    with remote:
        try:
            process = start(
                python_of_caller(_RANK, str(remote.fileno())),
                imports="nxd_infer.trace.ranks.process_main",
                importing=environment_of_caller(),
                environment=os.environ,
                inherit=[remote.fileno()],
                check=check,
            )
        except BaseException:
            ours.close()
            raise
    with contextlib.suppress(BrokenPipeError):
        ours.send(settings)
    return _Rank(settings, process, ours)


def _late(ranks: str) -> TraceError:
    return TraceError(f"tracing did not end within trace_timeout: still working: {ranks}; raise trace_timeout")


def error_of(failures: list[Failure]) -> TraceError:
    """Return the error of the failure that is a cause: what a rank reported, rather than its end, and that rather than
    what its peers say of a collective; of several the lowest rank's."""
    cause = min(failures, key=lambda one: (issubclass(one.type, CollectiveError), not one.kind, one.rank))
    if not cause.kind:
        return TraceError(cause.text, rank=cause.rank)
    if issubclass(cause.type, TraceConfigError):  # its message already says what to change
        return TraceConfigError(f"rank {cause.rank}: {cause.text}", rank=cause.rank, remote_traceback=cause.traceback)
    message = f"rank {cause.rank}: {cause.kind}: {cause.text}\n\n--- traceback of rank {cause.rank} ---\n"
    return TraceError(message + cause.traceback, rank=cause.rank, remote_traceback=cause.traceback)
