"""How much memory something takes at its height."""

from __future__ import annotations

import ctypes
import gc
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
MIB = 1 << 20
M_MMAP_THRESHOLD = -3


def anonymous() -> int:
    """Bytes of this process's memory that is not of files."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def growth(action: Callable[[], T]) -> tuple[T, int]:
    """Return what ``action`` returns, and the bytes by which anonymous memory grew at most, meanwhile.

    glibc raises its own limit for memory that is given back at once (to 32 MiB), with each block that is freed:
    here it stays, so that a test's tensors count no longer than those of a real model would. Gaps that
    earlier work left in the heap are taken first, and kept: measure in a process that has done nothing else.
    """
    libc = ctypes.CDLL(None)
    gc.collect()
    libc.mallopt(M_MMAP_THRESHOLD, MIB)
    libc.malloc_trim(0)
    start, most, done = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            most[0] = max(most[0], anonymous())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        result = action()
        most[0] = max(most[0], anonymous())
    finally:
        done.set()
        watcher.join(120)
    return result, most[0] - start
