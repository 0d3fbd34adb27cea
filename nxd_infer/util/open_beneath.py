"""Open a file below an open folder: with ``openat2``, which rejects paths that leave it, or by components."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import PurePosixPath

from nxd_infer.errors import OpenFilesError

_OPENAT2 = 437
_NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH = 0x02, 0x04, 0x08


def reopened(fd: int, flags: int = 0) -> int:
    """Return a descriptor for reading, from one opened with ``O_PATH``."""
    try:
        with enough_descriptors():
            return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | flags)
    finally:
        os.close(fd)


@contextlib.contextmanager
def enough_descriptors() -> Iterator[None]:
    """Raise OpenFilesError if the process has no free descriptor: the file itself is fine."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise OpenFilesError(
            f"{error.filename or 'a file'} cannot be opened now, because too many files and connections are open: try "
            "again later, or raise the limit (ulimit -n)"
        ) from error


class _How(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


@enough_descriptors()
def open_beneath(folder: int, name: str) -> int:
    """Return a descriptor of ``name`` below the folder ``folder``, to inspect or reopen: the file is not touched
    (``O_PATH``), even if it is a pipe or a device.

    Raises OSError: ELOOP if a component is a link, EXDEV if the name leaves the folder.
    """
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), name)
    if not parts:
        return os.dup(folder)
    found = _openat2(folder, name)
    return _open_by_parts(folder, parts) if found is None else found


def _openat2(folder: int, name: str) -> int | None:
    """Like :func:`open_beneath`, in one call; None if the kernel or a system call filter does not allow it."""
    how = _How(os.O_PATH | os.O_CLOEXEC, 0, _BENEATH | _NO_SYMLINKS | _NO_MAGICLINKS)
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    size = ctypes.c_size_t(ctypes.sizeof(how))
    found = call(ctypes.c_long(_OPENAT2), ctypes.c_int(folder), os.fsencode(name), ctypes.byref(how), size)
    if found >= 0:
        return found
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EPERM):
        return None
    raise OSError(number, os.strerror(number), name)


def _open_by_parts(folder: int, parts: tuple[str, ...]) -> int:
    found = os.dup(folder)
    for part in parts:
        try:
            inner = os.open(part, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=found)
        finally:
            os.close(found)
        found = inner
        if stat.S_ISLNK(os.fstat(found).st_mode):  # this descriptor refers to the link itself
            os.close(found)
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), part)
    return found
