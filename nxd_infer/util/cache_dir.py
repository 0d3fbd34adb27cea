"""The directory of what this package can rebuild: compiled libraries and graphs. Both are code that runs as the user,
so nobody else may be able to write there (``ownership``)."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from nxd_infer.errors import CacheUnavailableError, UntrustedCacheError
from nxd_infer.util.ownership import is_ours, others_may_change, shown, way_to

VARIABLE = "NXD_INFER_CACHE"


def cache_dir(*below: str) -> Path:
    """Return ``$NXD_INFER_CACHE``, else ``$XDG_CACHE_HOME/nxd_infer``, else ``~/.cache/nxd_infer``, plus ``below``.

    Created if missing. Directories named by this package are private (0700); one named by the variable keeps its mode,
    because it may hold other things too. Raises UntrustedCacheError if others could change its contents,
    CacheUnavailableError if it cannot be created.
    """
    try:
        return _created(below)
    except OSError as error:
        raise CacheUnavailableError(
            f"{error.filename or 'the cache'} cannot be used for the cache ({error.strerror or error}): set {VARIABLE} "
            "to a directory that you can write to"
        ) from error


def _created(below: Sequence[str]) -> Path:
    chosen = os.environ.get(VARIABLE)
    if chosen:
        base, ours = Path(chosen).expanduser().absolute(), list(below)
    else:
        home = os.environ.get("XDG_CACHE_HOME")
        base = (Path(home).expanduser() if home else Path.home() / ".cache").absolute()
        ours = ["nxd_infer", *below]
    _check_way(base)
    for name in ours:
        base = base / name
        _check_way(base, ours=base)
        info = base.stat()
        if info.st_uid == os.geteuid() and info.st_mode & 0o077:
            base.chmod(0o700)
    return base


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file of the cache. Raises UntrustedCacheError if another user created it, or could write to it."""
    with open(path, "rb") as file:
        info = os.fstat(file.fileno())
        if others_may_change(info):
            raise _refusal(path, info, "rm")
        yield file


def _check_way(path: Path, ours: Path | None = None) -> None:
    """Create ``path`` if it is missing, and check it and every directory and link on the way to it.

    The contents of ``ours`` can be rebuilt, so if others may have written there, removing it is better than closing it.
    """
    for entry in way_to(path):
        with contextlib.suppress(FileExistsError):
            if not os.path.lexists(entry):
                entry.mkdir(mode=0o700)
        info = entry.lstat()
        if others_may_change(info):
            raise _refusal(entry, info, "rm -r" if entry == ours else "chmod go-w")
        if not stat.S_ISLNK(info.st_mode) and not stat.S_ISDIR(info.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(entry))


def _refusal(path: Path, info: os.stat_result, fix: str) -> UntrustedCacheError:
    first = f"`{fix} {path}`, or " if is_ours(info) else ""
    return UntrustedCacheError(
        f"{shown(path, info)}: other users could put code there that would run as you, so this cache is not used. "
        f"Mend it by {first}by setting {VARIABLE} to a directory that only you can write to"
    )
