"""Paths that a request names: only what lies under the configured root, wherever links lead."""

from __future__ import annotations

import os
from pathlib import Path

from nxd_server.errors import ForbiddenPathError, RequestError


def path_under(root: Path | None, name: str, field: str = "path") -> Path:
    """The file or folder ``name`` (relative to ``root``, or absolute) with its links resolved.

    A folder is looked through, so that nothing in it leads out either. Raises ForbiddenPathError without a root, for
    ``..``, and for whatever lies outside of it; RequestError naming ``field`` when there is nothing, or a thing that is
    neither a file nor a folder.
    """
    if root is None:
        raise ForbiddenPathError("this server reads no paths: start it with --weights-root")
    if not name or "\0" in name:
        raise RequestError(field, "is no path")
    base = root.resolve()
    if ".." in Path(name).parts:
        raise ForbiddenPathError(f"{field}: no '..' is followed; name the place itself, under {root}")
    found = _inside(base, base / name, field)
    if os.path.isdir(found):
        for folder, folders, files in os.walk(found):
            for entry in (*folders, *files):
                path = Path(folder, entry)
                inner = _inside(base, path, field)
                if path.is_symlink() and inner.is_dir():
                    raise ForbiddenPathError(f"{field}: {path} is a link to a folder, which is not followed")
                if not (inner.is_file() or inner.is_dir()):
                    raise RequestError(field, f"{path} is neither a file nor a folder")
    elif not os.path.isfile(found):
        raise RequestError(field, f"there is no file or folder {name!r} under {root}")
    return found


def _inside(base: Path, path: Path, field: str) -> Path:
    try:
        found = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a name that no file can have
        raise RequestError(field, f"cannot be followed: {error}") from None
    if not found.is_relative_to(base):
        raise ForbiddenPathError(f"{field}: {str(path)!r} lies outside of {base}, or leads there")
    return found
