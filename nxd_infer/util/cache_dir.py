"""The directory of what this package can rebuild: compiled libraries and graphs. Both are code that runs as the user.

So nobody else may be able to write there. As in OpenSSH's StrictModes, each directory and link on the path must belong
to this user or to root, and must not be writable by the world or a group with other members. Directories such as
``/tmp`` are allowed: they are root's and sticky, so nobody can move another user's files.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from nxd_infer.errors import CacheUnavailableError, UntrustedCacheError

VARIABLE = "NXD_INFER_CACHE"
_MOST_LINKS = 40


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
        found = base.stat()
        if found.st_uid == os.geteuid() and found.st_mode & 0o077:
            base.chmod(0o700)
    return base


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file of the cache. Raises UntrustedCacheError if another user created it, or could write to it."""
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        if not _ours(found) or _others_write(found):
            raise _refusal(path, found, "rm")
        yield file


def _check_way(path: Path, ours: Path | None = None) -> None:
    """Create ``path`` if it is missing, and check it and every directory and link on the way to it.

    The contents of ``ours`` can be rebuilt, so if others may have written there, removing it is better than closing it.
    """
    here, links = Path("/"), 0
    rest = list(reversed(path.parts[1:]))
    _check(here)
    while rest:
        name = rest.pop()
        if name == "..":  # from a link's target; `here` contains no links
            here = here.parent
            continue
        entry = here / name
        with contextlib.suppress(FileExistsError):
            if not os.path.lexists(entry):
                entry.mkdir(mode=0o700)
        if not entry.is_symlink():
            _check(here := entry, "rm -r" if entry == ours else "chmod go-w")
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        _check(entry)
        target = entry.readlink()
        here = Path("/") if target.is_absolute() else here
        rest += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def _check(entry: Path, fix: str = "chmod go-w") -> None:
    found = entry.lstat()
    shared = found.st_uid == 0 and found.st_mode & stat.S_ISVTX
    if not _ours(found) or (_others_write(found) and not shared and not stat.S_ISLNK(found.st_mode)):
        raise _refusal(entry, found, fix)
    if not stat.S_ISLNK(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(entry))


def _others_write(found: os.stat_result) -> bool:
    """Whether another user may write there. A group with only this user, which many systems create with a umask of
    002, is not another user."""
    if found.st_mode & stat.S_IWOTH or not found.st_mode & stat.S_IWGRP:
        return bool(found.st_mode & stat.S_IWOTH)
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(found.st_gid)
    except KeyError:
        return True
    private = user.pw_gid == group.gr_gid and user.pw_name == group.gr_name
    return not private or not {*group.gr_mem} <= {user.pw_name}


def _ours(found: os.stat_result) -> bool:
    return found.st_uid in (0, os.geteuid())


def _refusal(path: Path, found: os.stat_result, fix: str) -> UntrustedCacheError:
    try:
        owner = f"{pwd.getpwuid(found.st_uid).pw_name} ({found.st_uid})"
    except KeyError:
        owner = str(found.st_uid)
    first = f"`{fix} {path}`, or " if _ours(found) else ""
    return UntrustedCacheError(
        f"{path} belongs to {owner} and has mode {stat.S_IMODE(found.st_mode):04o}: other users could put code there "
        f"that would run as you, so this cache is not used. Mend it by {first}by setting {VARIABLE} to a directory "
        "that only you can write to"
    )
