"""A bounded pool of compile processes. Each reuses its imports for several graphs; none outlives the call."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess  # nosec B404
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxd_infer.backends import registry
from nxd_infer.errors import TraceError
from nxd_infer.util.child_process import END_SECONDS, ChildProcess
from nxd_infer.util.processors import processors
from nxd_infer.util.python_command import child_environment, python_module
from nxd_infer.util.temporary import temporary_name


@dataclass
class _Worker:
    process: ChildProcess
    channel: socket.socket
    """To send jobs, and to receive answers."""
    log: Path
    """The compiler's output."""
    graph: Path | None = None
    started: float = 0.0
    rest: str = ""

    def end(self) -> None:
        self.process.end()
        self.channel.close()


def compile_graphs(
    backend: str,
    graph_dirs: Sequence[Path],
    options: Mapping[str, Any],
    *,
    workdir: Path | None = None,
    workers: int | None = None,
    timeout: float = 3600.0,
    report: Callable[[Path, float], None] | None = None,
) -> None:
    """Compile every graph directory. The compilers' other files end up below ``workdir`` (None: they are removed).

    Until then they are in a private, unpredictable directory: compilers execute what they find in theirs.

    At most two graphs are compiled at once, because a compiler may take much memory; ``workers`` limits that further.
    ``timeout`` limits each graph. ``report(graph directory, seconds)`` is called when a graph is done. Raises
    TraceError with the compiler's message.
    """
    if not graph_dirs:
        return
    with workplace(workdir) as place:
        pool: list[_Worker] = []
        try:
            pending = list(graph_dirs)
            for _ in range(min(len(pending), 2, processors(), workers or 2)):
                pool.append(_start(backend, place))
            active = 0
            while pending or active:
                for worker in pool:
                    if worker.graph is None and pending:
                        _assign(worker, pending.pop(0), options)
                        active += 1
                for worker, answer in _answers(pool, timeout):
                    if answer["error"]:
                        raise TraceError(
                            f"compiling graph {worker.graph and worker.graph.name} failed: {answer['error']}",
                            remote_traceback=answer.get("traceback", ""),
                        )
                    if report is not None and worker.graph is not None:
                        report(worker.graph, answer["seconds"])
                    worker.graph = None
                    active -= 1
        finally:
            for worker in pool:
                worker.end()


@contextlib.contextmanager
def workplace(workdir: Path | None) -> Iterator[Path]:
    """Yield a private, unpredictable directory, which is moved below ``workdir`` at the end, or removed.

    Raises TraceError if it cannot be moved, unless the block raises a more important error.
    """
    place = temporary_name("nxd-compile-")
    done = False
    try:
        place.mkdir(mode=0o700)
        yield place
        done = True
    finally:
        try:
            if workdir is not None:
                shutil.move(place, workdir / place.name)
        except OSError as error:
            if workdir is not None:
                shutil.rmtree(workdir / place.name, ignore_errors=True)  # remove the partial copy
            if done:
                raise TraceError(
                    f"compiler_workdir: what the compiler wrote cannot be moved to {workdir}: {error}; make room "
                    "there, choose another directory, or leave it out"
                ) from error
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _start(backend: str, place: Path) -> _Worker:
    temporary = place / "tmp"
    temporary.mkdir(exist_ok=True)
    chosen = registry.get(backend)
    environment = child_environment(**chosen.environment(place), TMPDIR=str(temporary), PYTHONWARNINGS="ignore")
    environment = registry.with_import_path(environment, backend)
    log = place / f"compile-{secrets.token_hex(4)}.log"
    channel, theirs = socket.socketpair()
    number = theirs.fileno()
    command = python_module("nxd_infer.backends.compile.worker", backend, str(number), str(os.getpid()))
    try:
        with open(log, "wb") as output:
            process = ChildProcess(
                command, environment=environment, inherit=[number], stdout=output, stderr=subprocess.STDOUT
            )
    except BaseException:
        channel.close()
        raise
    finally:
        theirs.close()
    return _Worker(process, channel, log)


def _assign(worker: _Worker, graph: Path, options: Mapping[str, Any]) -> None:
    worker.graph, worker.started = graph, time.monotonic()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # reading the answer will report its end
        job = {"graph": str(graph.absolute()), "options": dict(options)}
        worker.channel.sendall(json.dumps(job).encode() + b"\n")


def _answers(pool: list[_Worker], timeout: float) -> list[tuple[_Worker, dict[str, Any]]]:
    """Wait until a worker answers. Raises TraceError if one died or exceeded ``timeout``."""
    busy = [worker for worker in pool if worker.graph is not None]
    left = min(worker.started + timeout for worker in busy) - time.monotonic()
    poll = select.poll()  # select() supports no descriptor above 1023
    for worker in busy:
        poll.register(worker.channel, select.POLLIN)
    ready = {fd for fd, _ in poll.poll(min(max(0.0, left), 1e6) * 1000)}
    if not ready and time.monotonic() - min(worker.started for worker in busy) >= timeout:
        names = ", ".join(worker.graph.name for worker in busy if worker.graph)
        raise TraceError(f"compiling {names} took longer than {timeout:g} s; raise compile_timeout")
    found = []
    for worker in busy:
        if worker.channel.fileno() not in ready:
            continue
        try:
            data = worker.channel.recv(1 << 20).decode()
        except ConnectionResetError:  # it ended before it had read its job
            data = ""
        if not data:
            worker.process.wait(END_SECONDS)
            hint = " (out of memory?)" if worker.process.returncode == -signal.SIGKILL else ""
            name = worker.graph.name if worker.graph else ""
            how = worker.process.explain() + hint
            raise TraceError(f"the process that compiled {name} {how}\n{_tail(worker.log)}")
        worker.rest += data
        if worker.rest.endswith("\n"):
            found.append((worker, json.loads(worker.rest)))
            worker.rest = ""
    return found


def _tail(log: Path) -> str:
    try:
        return log.read_text(errors="replace")[-2000:]
    except OSError:
        return ""
