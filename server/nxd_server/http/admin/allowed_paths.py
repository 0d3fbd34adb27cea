"""Paths from requests: beneath the configured root, where nobody but the server's user and root can change anything."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from nxd_infer.util.ownership import others_may_change, shown, way_to
from nxd_server.errors import ForbiddenPathError, RequestError


def path_under(root: Path | None, name: str, field: str = "path") -> Path:
    """Return the file or folder ``name`` (relative to ``root``, or absolute) with its links resolved.

    A folder is searched, including the targets of its links, so that nothing in it leads outside either. Entries
    deleted meanwhile (by a running save) are skipped. Raises ForbiddenPathError without a root, for ``..``, for
    anything outside the root, and for what other users may change; RequestError naming ``field`` if it does not exist
    or is neither a file nor a folder.
    """
    if root is None:
        raise ForbiddenPathError("this server reads no paths: start it with --weights-root (NXD_INFER_WEIGHTS_ROOT)")
    if not name or "\0" in name:
        raise RequestError(field, "is not a path")
    if ".." in Path(name).parts:
        raise ForbiddenPathError(f"{field}: '..' is not followed; give the path itself, under {root}")
    base = root.resolve()
    try:
        resolved = _checked(base, base / name, field)
        resolved.stat()
        _search(base, resolved, field)
    except (ForbiddenPathError, RequestError):
        raise
    except (FileNotFoundError, NotADirectoryError):
        raise RequestError(field, f"there is no file or folder {name!r} under {root}") from None
    except (OSError, RuntimeError, ValueError) as error:  # a cycle of links, or an invalid file name
        raise RequestError(field, f"cannot be followed: {error}") from None
    return resolved


def _search(base: Path, top: Path, field: str) -> None:
    rest, seen = [top], {top}
    while rest:
        path = rest.pop()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            mode = path.stat().st_mode
            if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
                raise RequestError(field, f"{path} is neither a file nor a folder")
            for entry in os.listdir(path) if stat.S_ISDIR(mode) else ():
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    inner = _checked(base, path / entry, field)
                    if inner not in seen:  # a link may point to a folder that contains it
                        seen.add(inner)
                        rest.append(inner)


def _checked(base: Path, path: Path, field: str) -> Path:
    """Return ``path`` with its links resolved. Raises OSError if nothing is there."""
    resolved = path.resolve()
    if not resolved.is_relative_to(base):
        raise ForbiddenPathError(f"{field}: {str(path)!r} lies outside {base}, or links there")
    for entry in way_to(path):
        info = entry.lstat()
        if others_may_change(info):
            raise ForbiddenPathError(
                f"{field}: {shown(entry, info)}: other users could change what is loaded from there, so nothing is; it "
                f"must belong to the server's user or to root, and no other may write to it (`chmod go-w {entry}`)"
            )
    return resolved
