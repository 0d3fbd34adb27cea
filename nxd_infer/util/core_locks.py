"""Cores that processes of one user divide among themselves, by locked files in the directory of temporary files.

Never below the cache: containers share that as a volume, even on several machines, and each has cores of its own.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path


def lock_folder(kind: str) -> Path:
    """Where the files of this ``kind`` of cores lie."""
    return Path(tempfile.gettempdir()) / f"nxd-infer-{kind}-{os.getuid()}"


def lock_core(kind: str, core: int) -> int | None:
    """Lock ``core`` of this ``kind`` for this process, until that ends, or the descriptor that is returned is closed.

    None: another process has it. Raises OSError where nothing can be locked: no place to write, or another user's.
    """
    folder = lock_folder(kind)
    folder.mkdir(mode=0o700, exist_ok=True)
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(place).st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
        descriptor = os.open(str(core), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=place)
    finally:
        os.close(place)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
