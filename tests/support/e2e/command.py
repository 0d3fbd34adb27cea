"""Run the real command line in a process of its own, with a hard time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str


def nxd_infer(*arguments: object, timeout: float = 600, cwd: Path | None = None, columns: int = 160) -> Done:
    """``nxd-infer ARGUMENTS``; the environment is wide enough that tables are not wrapped."""
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


def nxd_infer_here(capsys, monkeypatch, *arguments: object) -> Done:
    """The same entry point in this process: for what ends before any work begins, where a start costs seconds."""
    from nxd_infer.cli.console import console
    from nxd_infer.cli.main import main

    monkeypatch.setattr(sys, "argv", ["nxd-infer", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(console, "width", 160)  # it took its width when it was made, perhaps by an earlier test
    status = 0
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        for number, handler in handlers.items():  # the command's would outlive it, and end a later test
            signal.signal(number, handler)
    told = capsys.readouterr()
    return Done(status, told.out, told.err)
