"""A lock between processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def only_one(path: Path, wait: float) -> Iterator[None]:
    """Hold the lock file ``path`` against other processes and threads; the kernel releases it when its holder ends.

    Raises TimeoutError if another one holds it for ``wait`` seconds, and OSError if the file cannot exist.
    """
    from filelock import FileLock  # slow to import; needed only for compiling

    with FileLock(path, timeout=wait):
        yield
