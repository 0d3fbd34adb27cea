"""Processes of a benchmark: one group each, stopped while others are measured, and ended with all their children."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from nxd_infer.processes.own import die_with_parent
from nxd_infer.util.memory import held_memory

if TYPE_CHECKING:
    from typing_extensions import Self

ROOT = Path(__file__).parents[1]
"""This checkout."""
END_SECONDS = 20.0


class Group:
    """A process with all its children. Leaving the ``with`` block ends them.

    ``pause`` stops all of them, so that threads that spin while waiting cost the others nothing.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        env: dict[str, str] | None = None,
        pipes: bool = False,
        fds: Sequence[int] = (),
        cwd: Path = ROOT,
    ):
        pipe = subprocess.PIPE if pipes else None
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or output,
                stderr=output,
                env=env,
                cwd=cwd,
                start_new_session=True,
                pass_fds=fds,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stdin(self) -> IO[Any]:
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def stdout(self) -> IO[Any]:
        assert self.process.stdout is not None
        return self.process.stdout

    def alive(self) -> bool:
        return self.process.poll() is None

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Running inside the block, stopped outside."""
        self.resume()
        try:
            yield
        finally:
            self.pause()

    def tail(self, lines: int = 15) -> str:
        """Return the end of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""

    def end(self) -> int | None:
        """Send SIGTERM to the first process, then SIGKILL to its session and to all its children, in any session;
        return the status of the first process."""
        self.resume()
        started = []
        if self.alive():
            for pid in tree(self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    started.append(os.pidfd_open(pid))  # a pid may belong to another process by then
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
        return self.kill(started)

    def kill(self, started: Sequence[int] = ()) -> int | None:
        """Send SIGKILL to all of them, and to the processes of the pidfds ``started``, which are closed."""
        self._signal(signal.SIGKILL)
        for process in started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            os.close(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return self.process.returncode

    def _signal(self, number: signal.Signals) -> None:
        """Signal every process; children may have their own group, and may have outlived their parent."""
        for process in tree(self.process.pid) if self.alive() else []:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, number)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def environment(root: Path = ROOT) -> dict[str, str]:
    """Return this process's environment, with the packages of the checkout ``root`` on Python's path."""
    if root == ROOT:
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(root / part) for part in (".", "server", "models"))}


def tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
    found = [pid]
    for process in found:
        found += children.get(process, [])
    return found


def memory_of(pid: int) -> int:
    """Return the proportional set size (PSS) of a process and its children, in bytes."""
    total = 0
    for process in tree(pid):
        with contextlib.suppress(OSError):
            found = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in found if line.startswith("Pss:"))
    return total


def memory_to_hold(pid: int) -> int:
    """Return :func:`memory_of` without page cache, which the system reclaims when it needs memory."""
    return sum(held_memory(process) or 0 for process in tree(pid))


class Peak:
    """Peak memory of a process and its children; called with the process repeatedly while it runs.

    Of two consecutive readings the lower one counts: a child that has not yet called exec shares its parent's memory,
    which would be counted twice.
    """

    def __init__(self) -> None:
        self.held = 0
        """See :func:`memory_to_hold`."""
        self.with_files = 0
        """See :func:`memory_of`."""
        self._last = (0, 0)

    def __call__(self, pid: int) -> None:
        now = memory_to_hold(pid), memory_of(pid)
        self.held = max(self.held, min(now[0], self._last[0]))
        self.with_files = max(self.with_files, min(now[1], self._last[1]))
        self._last = now
