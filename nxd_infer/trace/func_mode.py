"""func mode: one spawned process a rank runs the user's function on real weights, exports, and writes what it found.

Without ``max_parallel_compilations`` all ranks run at once, joined by gloo, so that ``func`` may use collectives.
With a smaller number they run in turns: func, export and writing together, so that no more than that many hold
weights at a time; a collective inside ``func`` would wait for a rank that has not started, and is an error.

Every wait is bounded; whatever ends the trace ends the processes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torch import Tensor

from nxd_infer import errors
from nxd_infer.errors import CollectiveError, NotInitializedError, TraceConfigError, TraceError
from nxd_infer.trace.request import TracedRank, TraceRequest, rank_directory

Message = list[Any]
GRACE = 1.0
"""Seconds other ranks have to report after the first failure, so that the cause is shown and not its echo."""


@dataclass
class RankSettings:
    """What a rank process is told besides the request."""

    rank: int
    degree: int
    together: bool
    """Whether all ranks run at once, joined by gloo."""
    build: str
    rendezvous: str
    port: int
    parent: int
    threads: int
    timeout: float


# --- the request as bytes -----------------------------------------------------------------------------


def pack(request: TraceRequest) -> bytes:
    """The request for another process. Raises TraceConfigError when a spawned process could not import ``func``."""
    reason = _unimportable(request.func)
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
    """Why a spawned process could not import ``func`` by its name, or None."""
    name = getattr(func, "__qualname__", "")
    if "<lambda>" in name:
        return "it is a lambda"
    if "<locals>" in name:
        return f"{name} is defined inside another function"
    if getattr(func, "__module__", None) == "__main__":
        main = sys.modules["__main__"]
        file = getattr(main, "__file__", None)
        if getattr(main, "__spec__", None) is None and (file is None or not os.path.exists(file)):
            return "it is defined in an interactive session"
    return None


# --- the parent ---------------------------------------------------------------------------------------


@dataclass
class _Rank:
    process: Any
    connection: Any
    """The parent's end of the rank's pipe."""
    rank: int
    place: str = "starting"


def trace_ranks(
    request: TraceRequest,
    build: Path,
    *,
    max_parallel: int | None,
    timeout: float,
    progress: Callable[[str, int, int, str], None],
) -> list[TracedRank]:
    """Trace every rank in a process of its own; results in rank order.

    Raises TraceError with the rank and its traceback (TraceConfigError where that is what the rank raised).
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise TraceConfigError(
            "parallel_model_trace was reached while a rank process imports this script: "
            "put the call under `if __name__ == '__main__':`"
        )
    payload = pack(request)
    degree = request.tp_degree
    together = max_parallel is None or max_parallel >= degree
    at_once = degree if together else max_parallel or 1
    deadline = time.monotonic() + timeout
    port = _free_port()
    results: dict[int, TracedRank] = {}
    running: list[_Rank] = []
    total = degree * len(request.buckets)
    done = 0
    progress("trace ranks", 0, total, "")
    try:
        waiting = list(range(degree))
        while len(results) < degree:
            while waiting and len(running) < at_once:
                settings = RankSettings(
                    rank=waiting.pop(0),
                    degree=degree,
                    together=together,
                    build=str(build),
                    rendezvous=str(build / "rendezvous"),
                    port=port,
                    parent=os.getpid(),
                    threads=max(1, (os.cpu_count() or 1) // at_once),
                    timeout=timeout,
                )
                running.append(_start(settings, payload))
            for message, member in _messages(running, deadline):
                if message[0] == "error":
                    _raise_failure([(member.rank, message), *_other_failures(running, member)])
                member.place = message[1] if len(message) > 1 else member.place
                if message[0] == "bucket":
                    done += 1
                    progress("trace ranks", min(done, total), total, f"rank {member.rank}: {message[1]}")
                if message[0] == "done":
                    results[member.rank] = TracedRank.model_validate_json(
                        (rank_directory(build, member.rank) / "result.json").read_bytes()
                    )
                    member.process.join(10)
                    _end(member)
                    running.remove(member)
    finally:
        for member in running:
            _end(member)
    progress("trace ranks", total, total, "")
    return [results[rank] for rank in range(degree)]


def _start(settings: RankSettings, payload: bytes) -> _Rank:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_rank_main, args=(theirs, settings), name=f"nxd trace rank {settings.rank}")
    process.start()
    theirs.close()
    with contextlib.suppress(BrokenPipeError):
        # Not an argument of the process: what cannot be unpickled is reported by the rank, with its traceback.
        mine.send_bytes(payload)
    return _Rank(process, mine, settings.rank)


def _messages(running: list[_Rank], deadline: float) -> Iterator[tuple[Message, _Rank]]:
    """What the ranks have to say, waiting for at least one of them. Raises TraceError for a dead or late rank."""
    left = deadline - time.monotonic()
    by_object: dict[Any, _Rank] = {m.connection: m for m in running}
    ready = wait(list(by_object), timeout=max(0.0, left))
    if not ready:
        late = ", ".join(f"rank {m.rank} ({m.place})" for m in running)
        raise TraceError(f"tracing did not end within trace_timeout: still working: {late}; raise trace_timeout")
    for connection in ready:
        member = by_object[connection]
        try:
            yield member.connection.recv(), member
        except (EOFError, OSError):
            member.process.join(10)
            raise TraceError(_died(member), rank=member.rank) from None


def _died(member: _Rank) -> str:
    code = member.process.exitcode
    how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"status {code}"
    if member.place == "starting":
        return (
            f"the process of rank {member.rank} ended with {how} before func ran (its output is above). If this script "
            "calls parallel_model_trace at its top level, put the call under `if __name__ == '__main__':`"
        )
    hint = "; it may have run out of memory: try max_parallel_compilations=1" if code == -signal.SIGKILL else ""
    return f"the process of rank {member.rank} ended with {how} while tracing ({member.place}){hint}"


def _other_failures(running: list[_Rank], first: _Rank) -> list[tuple[int, Message]]:
    """Failures of other ranks that follow closely: the first one heard may be the echo of another."""
    found: list[tuple[int, Message]] = []
    others: dict[Any, _Rank] = {m.connection: m for m in running if m is not first}
    end = time.monotonic() + GRACE
    while others and time.monotonic() < end:
        for connection in wait(list(others), timeout=max(0.0, end - time.monotonic())):
            member = others[connection]
            try:
                message = member.connection.recv()
            except (EOFError, OSError):
                others.pop(member.connection)
                continue
            if message[0] == "error":
                found.append((member.rank, message))
                others.pop(member.connection)
    return found


def _raise_failure(failures: list[tuple[int, Message]]) -> None:
    """Raise for the failure that is a cause: one that is not about a collective, of the lowest rank."""
    rank, (_, kind, text, remote) = min(failures, key=lambda f: (issubclass(_class(f[1][1]), CollectiveError), f[0]))
    cls = _class(kind)
    message = f"rank {rank}: {kind}: {text}\n\n--- traceback of rank {rank} ---\n{remote}"
    if issubclass(cls, TraceConfigError):
        raise TraceConfigError(message, rank=rank, remote_traceback=remote)
    raise TraceError(message, rank=rank, remote_traceback=remote)


def _class(name: str) -> type:
    found = getattr(errors, name, None)
    return found if isinstance(found, type) else Exception


def _end(member: _Rank) -> None:
    """End a rank and whatever it started. Its process group is its own."""
    pid = member.process.pid
    if member.process.is_alive() and pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            member.process.kill()
    member.process.join(10)
    member.connection.close()
    member.process.close()


def _free_port() -> int:
    """A port nobody uses now, for ``MASTER_PORT`` of code in ``func`` that wants one; the ranks meet in a file."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# --- a rank -------------------------------------------------------------------------------------------


def _rank_main(connection: Connection, settings: RankSettings) -> None:
    from nxd_infer.comm.process import die_with_parent

    die_with_parent(settings.parent)
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    try:
        _trace_here(connection, settings)
        connection.send(["done"])
        connection.close()
    except BaseException as error:
        text = str(error)
        if not settings.together and _about_groups(error):
            text += (
                f" (a collective, or a process group, was used in func while max_parallel_compilations is below "
                f"tp_degree={settings.degree}: the ranks run in turns and cannot communicate; leave "
                "max_parallel_compilations out, or keep collectives out of func)"
            )
        remote = io.StringIO()
        traceback.print_exc(file=remote)
        with contextlib.suppress(OSError):
            connection.send(["error", type(error).__name__, text, remote.getvalue()])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # exit handlers of torch.distributed can wait for peers that are gone


def _about_groups(error: BaseException) -> bool:
    return isinstance(error, (CollectiveError, NotInitializedError)) or "process group" in str(error).lower()


def _trace_here(connection: Connection, settings: RankSettings) -> None:
    import resource

    import torch

    from nxd_infer.backends.lower import native_library
    from nxd_infer.trace import rank_files, rank_trace
    from nxd_infer.trace.manifest import WeightSpec
    from nxd_infer.trace.weights import describe_layout

    start = time.monotonic()
    payload = connection.recv_bytes()
    os.environ.update(
        RANK=str(settings.rank),
        LOCAL_RANK=str(settings.rank),
        WORLD_SIZE=str(settings.degree),
        LOCAL_WORLD_SIZE=str(settings.degree),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(settings.port),
        NXD_SKIP_RENDEZVOUS="1",
    )
    torch.set_num_threads(settings.threads)
    _connect(settings)
    request: TraceRequest = pickle.loads(payload)
    out = rank_directory(Path(settings.build), settings.rank)
    connection.send(["place", "func"])
    built = rank_trace.build(request, rank_trace.require_values)
    graphs = rank_trace.trace_buckets(
        request,
        built,
        native_library() if request.native else None,
        lambda index: connection.send(["bucket", request.buckets[index].name]),
    )
    rank_files.write_graphs(graphs, out)

    def value(spec: WeightSpec) -> Tensor:
        return rank_trace.value_of(graphs, *graphs.origin[spec.name])

    rank_files.write_weights(graphs, rank_files.initial_states(request, graphs), value, out / rank_files.WEIGHTS_FILE)
    result = TracedRank(
        rank=settings.rank,
        buckets=graphs.buckets,
        states=[graphs.states[name] for name in sorted(graphs.states)],
        weights=[graphs.weights[name] for name in sorted(graphs.weights)],
        layout=describe_layout(rank_files.layouts(graphs), settings.degree) if settings.rank == 0 else {},
        seconds=time.monotonic() - start,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    (out / "result.json").write_text(result.model_dump_json(), encoding="utf-8")


def _connect(settings: RankSettings) -> None:
    """Make this process the rank it is: a default context, and a transport or one that refuses."""
    import datetime

    from nxd_infer.comm import register_collectives
    from nxd_infer.context import make_context, set_default_context
    from nxd_infer.parallel_state import TRACE_COLLECTIVES

    context = make_context(settings.degree, settings.rank, tp=settings.degree, collectives=TRACE_COLLECTIVES)
    if settings.together:
        import torch.distributed as dist
        from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

        from nxd_infer.comm.distributed import DistributedCollectives

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            store=FileStore(settings.rendezvous, settings.degree),
            rank=settings.rank,
            world_size=settings.degree,
            timeout=datetime.timedelta(seconds=settings.timeout),
        )
        world = dist.group.WORLD
        transport = DistributedCollectives(context, {"tp": world} if world is not None else {}, settings.timeout)
        register_collectives(TRACE_COLLECTIVES, transport)
    else:
        register_collectives(TRACE_COLLECTIVES, RefusingCollectives())
    set_default_context(context)


class RefusingCollectives:
    """The transport of ranks that run in turns: every call is an error that says why."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise CollectiveError("a collective was called while the ranks are traced in turns")

    all_reduce = all_gather = reduce_scatter = broadcast = send = recv = barrier = _refuse

    def close(self) -> None:
        """Nothing to close."""
