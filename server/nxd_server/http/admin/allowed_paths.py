"""Paths that a request names: only what lies under the configured root, wherever links lead."""

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
    """What :func:`path_under` finds, opened for the block: whatever becomes a link meanwhile leads nowhere else."""
    found = path_under(root, name, field)
    base = Path(os.path.realpath(root or ""))
    with contextlib.ExitStack() as stack:
        try:
            opened = stack.enter_context(opened_beneath(base, str(found.relative_to(base))))
        except (OSError, ValueError) as error:  # it went away, or the root itself leads elsewhere now
            raise RequestError(field, f"{name!r} was replaced while it was looked for: {error}") from None
        yield opened


def path_under(root: Path | None, name: str, field: str = "path") -> Path:
    """The file or folder ``name`` (relative to ``root``, or absolute) with its links resolved.

    A folder is looked through, whatever its links lead to as well, so that nothing in it leads out either. What goes
    away meanwhile (somebody saves into it) is passed over. Raises ForbiddenPathError without a root, for ``..``, and
    for whatever lies outside of it; RequestError naming ``field`` when there is nothing, or a thing that is neither a
    file nor a folder.
    """
    if root is None:
        raise ForbiddenPathError("this server reads no paths: start it with --weights-root")
    if not name or "\0" in name:
        raise RequestError(field, "is no path")
    base = root.resolve()
    if ".." in Path(name).parts:
        raise ForbiddenPathError(f"{field}: no '..' is followed; name the place itself, under {root}")
    try:
        found = _inside(base, base / name, field)
    except FileNotFoundError:
        raise RequestError(field, f"{name!r} went away under {root} while it was looked for") from None
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
            if stat.S_ISDIR(mode) and inner not in seen:  # links may lead to where they are
                seen.add(inner)
                folders.append(inner)
            elif mode and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise RequestError(field, f"{path} is neither a file nor a folder")
    return found


def _entries(folder: Path, field: str) -> list[Path]:
    """What lies in a folder, one more than MOST_ENTRIES at most."""
    try:
        with os.scandir(folder) as entries:
            return [folder / entry.name for entry in itertools.islice(entries, MOST_ENTRIES + 1)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RequestError(field, f"cannot be looked through: {error}") from None


def _mode(path: Path, field: str) -> int:
    """What stands at ``path``, as ``st_mode``; 0 for nothing."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError as error:
        raise RequestError(field, f"cannot be read: {error}") from None


def _inside(base: Path, path: Path, field: str) -> Path:
    """``path`` with its links resolved. Raises FileNotFoundError for a link that goes away in that moment."""
    try:
        found = path.resolve()
    except FileNotFoundError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a name that no file can have
        raise RequestError(field, f"cannot be followed: {error}") from None
    if not found.is_relative_to(base):
        raise ForbiddenPathError(f"{field}: {str(path)!r} lies outside of {base}, or leads there")
    return found
