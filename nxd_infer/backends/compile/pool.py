"""A bounded pool of compile processes. Each reuses its imports for several graphs; none outlives the call."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import shutil
import signal
import socket
import subprocess  # nosec B404
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from nxd_infer.backends import registry
from nxd_infer.errors import TraceError
from nxd_infer.processes.child import END_SECONDS, ChildProcess
from nxd_infer.processes.command import child_environment, python_module
from nxd_infer.util.machine import processors


class _Worker:
    """A process that compiles one graph at a time."""

    def __init__(self, backend: str, place: Path):
        temporary = place / "tmp"
        temporary.mkdir(exist_ok=True)
        own = registry.get(backend).environment(place)
        environment = child_environment(**own, TMPDIR=str(temporary), PYTHONWARNINGS="ignore")
        self._log = place / f"compile-{secrets.token_hex(4)}.log"
        self._channel, remote = socket.socketpair()
        self._answers = self._channel.makefile("rb")
        arguments = (backend, str(remote.fileno()), str(os.getpid()))
        with remote, open(self._log, "wb") as output:
            self._process = ChildProcess(
                python_module("nxd_infer.backends.compile.worker", *arguments),
                environment=registry.with_import_path(environment, backend),
                inherit=[remote.fileno()],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def compile(self, graph: Path, options: Mapping[str, Any], timeout: float) -> float:
        """Compile a graph directory, and return how many seconds it took. Raises TraceError if that fails."""
        job = {"graph": str(graph.absolute()), "options": dict(options)}
        try:
            self._channel.settimeout(timeout)
            self._channel.sendall(json.dumps(job).encode() + b"\n")
            line = self._answers.readline()
        except TimeoutError:
            raise TraceError(f"compiling {graph.name} took longer than {timeout:g} s; raise compile_timeout") from None
        except ConnectionError:  # it ended before it had read its job
            line = b""
        if not line:
            self._process.wait(END_SECONDS)
            hint = " (out of memory?)" if self._process.returncode == -signal.SIGKILL else ""
            output = self._log.read_text(errors="replace")[-2000:]
            raise TraceError(f"the process that compiled {graph.name} {self._process.explain()}{hint}\n{output}")
        answer = json.loads(line)
        if answer["error"]:
            message = f"compiling graph {graph.name} failed: {answer['error']}"
            raise TraceError(message, remote_traceback=answer.get("traceback", ""))
        return answer["seconds"]

    def end(self) -> None:
        """End it; a thread that waits for an answer gets none."""
        self._process.end()

    def close(self) -> None:
        self._answers.close()
        self._channel.close()


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
        idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()

        def compile_one(graph: Path) -> float:
            worker = idle.get()
            try:
                return worker.compile(graph, options, timeout)
            finally:
                idle.put(worker)

        count = min(len(graph_dirs), 2, processors(), workers or 2)
        executor = ThreadPoolExecutor(count)
        try:
            for _ in range(count):
                pool.append(_Worker(backend, place))
                idle.put(pool[-1])
            graphs = {executor.submit(compile_one, graph): graph for graph in graph_dirs}
            for future in as_completed(graphs):
                seconds = future.result()
                if report is not None:
                    report(graphs[future], seconds)
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
            for worker in pool:
                worker.end()
            executor.shutdown()
            for worker in pool:
                worker.close()


@contextlib.contextmanager
def workplace(workdir: Path | None) -> Iterator[Path]:
    """Yield a private, unpredictable directory, which is moved below ``workdir`` at the end, or removed.

    Raises TraceError if it cannot be moved, unless the block raises a more important error.
    """
    with tempfile.TemporaryDirectory(prefix="nxd-compile-", ignore_cleanup_errors=True) as name:
        place = Path(name)
        done = False
        try:
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
