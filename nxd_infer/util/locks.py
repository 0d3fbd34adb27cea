"""One process at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def only_one(path: Path, wait: float) -> Iterator[None]:
    """Hold the lock file ``path`` against other processes and threads; the kernel releases it when its holder ends.

    Raises TimeoutError when another one keeps it for ``wait`` seconds, and OSError where there can be no such file.
    """
    from filelock import FileLock  # slow to import; needed only where something is compiled

    with FileLock(path, timeout=wait):
        yield
