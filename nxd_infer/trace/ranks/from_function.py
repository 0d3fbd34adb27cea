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
from dataclasses import dataclass
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
from nxd_infer.trace.ranks import process_main
from nxd_infer.trace.ranks.traced import RESULT_FILE, TracedRank, rank_directory
from nxd_infer.trace.request import TraceRequest
from nxd_infer.util.ports import free_port
from nxd_infer.util.processors import processors
from nxd_infer.util.progress import silent

Message = list[Any]
GRACE = 1.0
"""Seconds for other ranks to report after the first failure, so that the cause is shown and not a consequence."""
_DIED = "died"
"""In place of an error's class: the rank reported none."""


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
    process: ChildProcess
    connection: Any
    """The parent's end of the rank's pipe."""
    rank: int
    place: str = "starting"

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
    (build / process_main.REQUEST_FILE).write_bytes(pack(request))
    options, progress = request.options, request.options.progress or silent
    degree, stages = options.tp_degree, options.pp_degree
    max_parallel, timeout = options.max_parallel_compilations, options.trace_timeout
    together = max_parallel is None or max_parallel >= degree
    at_once = degree if together else max_parallel or 1
    deadline = time.monotonic() + timeout
    port = free_port()  # ``MASTER_PORT`` of code in ``func``; the ranks themselves meet in a file
    prepared = preparation()
    results: dict[int, list[TracedRank]] = {}
    """The stages of each tensor parallel rank."""
    failures: list[tuple[int, Message]] = []
    running: list[_Rank] = []
    total = degree * len(request.buckets)
    done = 0
    progress("trace ranks", 0, total, "")
    try:
        waiting = list(range(degree))
        while len(results) < degree and (running or not failures):
            while waiting and len(running) < at_once and not failures:
                settings = process_main.RankSettings(
                    rank=waiting.pop(0),
                    degree=degree,
                    pp_degree=stages,
                    together=together,
                    build=str(build),
                    rendezvous=str(build / "rendezvous"),
                    port=port,
                    parent=os.getpid(),
                    preparation=prepared,
                    compat=compat.is_installed(),
                    threads=max(1, processors() // at_once),
                    timeout=timeout,
                )
                running.append(_start(settings, deadline))
            messages = _messages(running, deadline)
            if not messages:
                break
            for message, member in messages:
                if message[0] == "error":
                    failures.append((member.rank, message))
                    deadline = min(deadline, time.monotonic() + GRACE)
                elif message[0] == "bucket":
                    done += 1
                    progress("trace ranks", min(done, total), total, f"rank {member.rank}: {message[1]}")
                elif message[0] == "done":
                    own = [stage * degree + member.rank for stage in range(stages)]
                    files = [rank_directory(build, rank) / RESULT_FILE for rank in own]
                    results[member.rank] = [TracedRank.model_validate_json(file.read_bytes()) for file in files]
                if message[0] in ("error", "done"):
                    running.remove(member)
                    member.end(patience=10)
        if failures:
            _raise_failure(failures)
        if len(results) < degree:
            raise _late(", ".join(f"rank {member.rank} ({member.place})" for member in running))
    finally:
        for member in running:
            member.end()
    progress("trace ranks", total, total, "")
    return sorted((stage for rank in results.values() for stage in rank), key=lambda result: result.rank)


_RANK = """
from nxd_infer.trace.ranks.process_main import main
main(int(sys.argv[1]))
"""


_IMPORTS = "nxd_infer.trace.ranks.imports"


def _start(settings: process_main.RankSettings, deadline: float) -> _Rank:
    def check() -> None:
        if time.monotonic() > deadline:
            raise _late(f"rank {settings.rank} (starting)")

    mine, theirs = Pipe()
    try:
        process = start(
            python_of_caller(_RANK, str(theirs.fileno())),
            imports=_IMPORTS,
            importing=environment_of_caller(),
            environment=os.environ,
            inherit=[theirs.fileno()],
            check=check,
        )
    except BaseException:
        mine.close()
        raise
    finally:
        theirs.close()
    with contextlib.suppress(BrokenPipeError):
        mine.send(settings)
    return _Rank(process, mine, settings.rank)


def _messages(running: list[_Rank], deadline: float) -> list[tuple[Message, _Rank]]:
    """Return the ranks' next messages, an error in place of a dead rank's; none once the deadline has passed."""
    members: dict[Any, _Rank] = {member.connection: member for member in running}
    received: list[tuple[Message, _Rank]] = []
    for connection in wait(list(members), timeout=max(0.0, deadline - time.monotonic())):
        member = members[connection]
        try:
            message = member.connection.recv()
        except (EOFError, OSError):
            message = ["error", _DIED, _how_it_died(member), ""]
        if message[0] in ("place", "bucket"):
            member.place = message[1]
        received.append((message, member))
    return received


def _late(ranks: str) -> TraceError:
    return TraceError(f"tracing did not end within trace_timeout: still working: {ranks}; raise trace_timeout")


def _how_it_died(member: _Rank) -> str:
    member.process.wait(END_SECONDS)
    how = member.process.explain()
    if member.place == "starting":
        return f"the process of rank {member.rank} {how} before func ran; what it printed is above"
    killed = member.process.returncode == -signal.SIGKILL
    hint = "; it may have run out of memory: try max_parallel_compilations=1" if killed else ""
    return f"the process of rank {member.rank} {how} while tracing ({member.place}){hint}"


def _raise_failure(failures: list[tuple[int, Message]]) -> None:
    """Raise the failure that is a cause: what a rank reported, rather than its end, and that rather than what its peers
    say of a collective; of several the lowest rank's."""

    def order(failure: tuple[int, Message]) -> tuple[bool, bool, int]:
        rank, (_, kind, *_) = failure
        return issubclass(_class(kind), CollectiveError), kind == _DIED, rank

    rank, (_, kind, text, remote) = min(failures, key=order)
    if kind == _DIED:
        raise TraceError(text, rank=rank)
    cls = _class(kind)
    if issubclass(cls, TraceConfigError):  # its message already says what to change
        raise TraceConfigError(f"rank {rank}: {text}", rank=rank, remote_traceback=remote)
    message = f"rank {rank}: {kind}: {text}\n\n--- traceback of rank {rank} ---\n{remote}"
    raise TraceError(message, rank=rank, remote_traceback=remote)


def _class(name: str) -> type:
    found = getattr(errors, name, None)
    return found if isinstance(found, type) else Exception
