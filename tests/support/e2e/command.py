"""Run the command line in this process, or in one of its own with a hard time limit."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str


def nxd_infer(*arguments: object, timeout: float = 600, cwd: Path | None = None, columns: int = 160) -> Done:
    """``nxd-infer ARGUMENTS`` as a process; the environment is wide enough that tables are not wrapped."""
    command = [sys.executable, "-m", "nxd_infer.cli.main", *map(str, arguments)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env={**os.environ, "COLUMNS": str(columns), "OMP_NUM_THREADS": "1"},
    )
    return Done(done.returncode, done.stdout, done.stderr)


def refused(done: Done, *words: str) -> None:
    """A user error: exit status 1 or 2, one message that holds ``words``, no traceback."""
    assert done.status in (1, 2), done
    assert "Traceback" not in done.err + done.out, done.err
    for word in words:
        assert word in done.err, (word, done.err)


def here(*arguments: object, columns: int = 160) -> Done:
    """The same entry point in this process, where a start costs seconds."""
    from nxd_infer.cli.console import aside, console
    from nxd_infer.cli.main import main

    out, err, status = io.StringIO(), io.StringIO(), 0
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["nxd-infer", *map(str, arguments)])
        patch.setenv("COLUMNS", str(columns))
        for one in (console, aside):  # it took its width when it was made, perhaps by an earlier test
            patch.setattr(one, "width", columns)
        try:
            main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            for number, handler in handlers.items():  # the command's would outlive it, and end a later test
                signal.signal(number, handler)
    return Done(status, out.getvalue(), err.getvalue())
