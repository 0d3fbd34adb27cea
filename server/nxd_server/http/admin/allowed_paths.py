"""Resolve paths from requests, allowing only what is inside the configured root after following links."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from nxd_infer.util.beneath import MOST_ENTRIES, BeneathPath, opened_beneath
from nxd_server.errors import ForbiddenPathError, RequestError


@contextlib.contextmanager
def opened_under(root: Path | None, name: str, field: str = "path") -> Iterator[BeneathPath]:
    """Open the result of :func:`path_under` for the block, so that links created meanwhile cannot redirect it."""
    found = path_under(root, name, field)
    base = Path(os.path.realpath(root or ""))
    with contextlib.ExitStack() as stack:
        try:
            opened = stack.enter_context(opened_beneath(base, str(found.relative_to(base))))
        except (OSError, ValueError) as error:  # it was deleted, or the root itself changed
            raise RequestError(field, f"{name!r} was replaced during the lookup: {error}") from None
        yield opened


def path_under(root: Path | None, name: str, field: str = "path") -> Path:
    """Return the file or folder ``name`` (relative to ``root``, or absolute) with its links resolved.

    A folder is searched, including the targets of its links, so that nothing in it leads outside either. Entries
    deleted meanwhile (by a running save) are skipped. Raises ForbiddenPathError without a root, for ``..``, and for
    anything outside the root; RequestError naming ``field`` if it does not exist or is neither a file nor a
    folder.
    """
    if root is None:
        raise ForbiddenPathError("this server reads no paths: start it with --weights-root (NXD_INFER_WEIGHTS_ROOT)")
    if not name or "\0" in name:
        raise RequestError(field, "is not a path")
    base = root.resolve()
    if ".." in Path(name).parts:
        raise ForbiddenPathError(f"{field}: '..' is not followed; give the path itself, under {root}")
    try:
        found = _inside(base, base / name, field)
    except FileNotFoundError:
        raise RequestError(field, f"{name!r} was deleted under {root} during the lookup") from None
    mode = _mode(found, field)
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise RequestError(field, f"there is no file or folder {name!r} under {root}")
    seen, folders, count = {found}, [found] if stat.S_ISDIR(mode) else [], 0
    while folders:
        for path in _entries(folders.pop(), field):
            count += 1
            if count > MOST_ENTRIES:
                raise RequestError(field, f"more than {MOST_ENTRIES} files lie under {found}; name a folder in it")
            try:
                inner = _inside(base, path, field)
            except FileNotFoundError:
                continue
            mode = _mode(inner, field)
            if stat.S_ISDIR(mode) and inner not in seen:  # a link may point to a folder that contains it
                seen.add(inner)
                folders.append(inner)
            elif mode and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise RequestError(field, f"{path} is neither a file nor a folder")
    return found


def _entries(folder: Path, field: str) -> list[Path]:
    """Return the entries of a folder, at most MOST_ENTRIES plus one."""
    try:
        with os.scandir(folder) as entries:
            return [folder / entry.name for entry in itertools.islice(entries, MOST_ENTRIES + 1)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RequestError(field, f"cannot be searched: {error}") from None


def _mode(path: Path, field: str) -> int:
    """Return the ``st_mode`` of ``path``; 0 if nothing is there."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError as error:
        raise RequestError(field, f"cannot be read: {error}") from None


def _inside(base: Path, path: Path, field: str) -> Path:
    """Return ``path`` with its links resolved. Raises FileNotFoundError for a link that is deleted meanwhile."""
    try:
        found = path.resolve()
    except FileNotFoundError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # a cycle of links, or an invalid file name
        raise RequestError(field, f"cannot be followed: {error}") from None
    if not found.is_relative_to(base):
        raise ForbiddenPathError(f"{field}: {str(path)!r} lies outside {base}, or links there")
    return found
