"""Who else may change a file or a directory. As in OpenSSH's StrictModes, it must belong to this user or to root, and
must not be writable by the world or by a group with other members.

Directories such as ``/tmp`` are allowed: they are root's and sticky, so nobody can move another user's files.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

_MOST_LINKS = 40


def way_to(path: Path) -> Iterator[Path]:
    """Yield every directory and link on the way to ``path``, which is absolute, and what it leads to.

    An entry is looked at after it was yielded, so the caller may create it. Raises OSError for a cycle of links.
    """
    here, links = Path("/"), 0
    rest = list(reversed(path.parts[1:]))
    yield here
    while rest:
        name = rest.pop()
        if name == "..":  # from a link's target; `here` contains no links
            here = here.parent
            continue
        entry = here / name
        yield entry
        if not entry.is_symlink():
            here = entry
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = entry.readlink()
        here = Path("/") if target.is_absolute() else here
        rest += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def others_may_change(info: os.stat_result) -> bool:
    """Whether a user other than this one and root may change a file's contents, or a directory's entries."""
    if not is_ours(info):
        return True
    shared = stat.S_ISDIR(info.st_mode) and info.st_uid == 0 and info.st_mode & stat.S_ISVTX
    return _others_write(info) and not shared and not stat.S_ISLNK(info.st_mode)


def is_ours(info: os.stat_result) -> bool:
    """Whether it belongs to this user or to root."""
    return info.st_uid in (0, os.geteuid())


def shown(path: Path, info: os.stat_result) -> str:
    """Return the beginning of a message: the path, its owner and its mode."""
    try:
        owner = f"{pwd.getpwuid(info.st_uid).pw_name} ({info.st_uid})"
    except KeyError:
        owner = str(info.st_uid)
    return f"{path} belongs to {owner} and has mode {stat.S_IMODE(info.st_mode):04o}"


def _others_write(info: os.stat_result) -> bool:
    """Whether another user may write there. A group with only this user, which many systems create with a umask of
    002, is not another user."""
    if info.st_mode & stat.S_IWOTH or not info.st_mode & stat.S_IWGRP:
        return bool(info.st_mode & stat.S_IWOTH)
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(info.st_gid)
    except KeyError:
        return True
    private = user.pw_gid == group.gr_gid and user.pw_name == group.gr_name
    return not private or not {*group.gr_mem} <= {user.pw_name}
