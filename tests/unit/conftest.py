"""A unit test starts no process and opens no socket: one that does fails where it does so."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

IMPURE = {
    *("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"),
    *("socket.bind", "socket.connect"),
}
_watched = False


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    # Threads of tests of integration that ran here before may still be ending.
    if arguments and arguments[0] == "fc-list":
        return  # matplotlib, once per machine, when it is first imported
    if _watched and event in IMPURE and threading.current_thread() is threading.main_thread():
        raise RuntimeError(f"{event}{arguments!r:.200}: this test belongs in tests/integration")


sys.addaudithook(_watch)


@pytest.fixture(autouse=True)
def in_one_process() -> Iterator[None]:
    global _watched
    _watched = True
    yield
    _watched = False
