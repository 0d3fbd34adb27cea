"""``nxd-infer serve`` as the pages print it, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.processes import wait_until


@contextlib.contextmanager
def serving(words: Sequence[str], port: int, folder: Path) -> Iterator[None]:
    """Run ``nxd-infer WORDS`` in ``folder``, ready on ``port``; told to end, it must do so with status 0."""
    server = subprocess.Popen(
        [sys.executable, "-m", "nxd_infer.cli.main", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_ready(port, server)
        yield
        server.terminate()
        assert server.wait(60) == 0
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def _wait_ready(port: int, server: subprocess.Popen) -> None:
    def ready() -> bool:
        assert server.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    wait_until(ready, 600)
