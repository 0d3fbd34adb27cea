"""Files of a folder that others can write to: each is opened once, beneath a root, and nothing else is ever read.

A program that checks a name and opens it later may open something else: in between, a component can become a link to
anywhere. So the kernel checks (``openat2``), or, if it cannot, each component is opened below the previous one, and
none may be a link. A link that existed before is followed by its target's name, beneath the root.

A :class:`BeneathPath` has the methods of ``pathlib.Path`` that readers use. Its name for ``open`` is
``/proc/self/fd/N``, which is the same file as when it was first opened. Files are never mapped, because truncating a
mapped file would end the reader (SIGBUS).
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import itertools
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from nxd_infer.errors import CheckpointError
from nxd_infer.util.open_beneath import enough_descriptors, open_beneath, reopened

MOST_TEXT = 8 << 20
"""Size limit of files that are parsed as a whole: an index, a configuration, a manifest, a tensor file's header."""
MOST_VALUES = 1 << 19
"""Approximate limit of values in such a file: creating them blocks the interpreter."""
MOST_PARSED = 256 << 20
"""Size limit of all parsed files below one name. A file counts as at least a page, which bounds their number."""
_PAGE = 4096
MOST_ENTRIES = 100_000
"""Most files and folders below one name, all of which are visited."""
MOST_OPEN = 16
"""Most files below one name that stay open."""
_SPARSE = 1 << 20
"""Larger files must not be sparse: at least an eighth must be on the disk (it may be compressed)."""
_TICK = 50_000_000
"""Nanoseconds within which a second change may leave a file's time unchanged."""


class _Place:
    """A root, a name below it, and the files of that name that are being read; the last ones stay open."""

    def __init__(self, root: str, name: str):
        self.root, self.where = root, os.path.normpath(os.path.join(root, name))
        self._seen: dict[str, os.stat_result] = {}
        """Every file's status when it was first opened."""
        self._open: dict[str, int] = {}
        """Descriptors by name, the most recently used last."""
        self._left = MOST_PARSED
        with enough_descriptors():
            self._root = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._top = open_beneath(self._root, name)
        except BaseException:
            os.close(self._root)
            raise

    def close(self) -> None:
        for fd in (self._root, self._top, *self._open.values()):
            os.close(fd)
        self._open.clear()

    def shown(self, name: str) -> str:
        return os.path.join(self.where, name) if name else self.where

    def open(self, name: str) -> int:
        """Like :func:`open_beneath`, below the name; follows a link that leads to a place below the root."""
        try:
            return open_beneath(self._top, name)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
        target = os.path.realpath(f"/proc/self/fd/{self._top}/{name}")
        inside = os.path.relpath(target, self.root)
        if ".." in PurePosixPath(inside).parts:
            raise CheckpointError(f"{self.shown(name)} leads out of {self.root}: copy there what it leads to")
        return open_beneath(self._root, inside)

    def stat(self, name: str) -> os.stat_result:
        fd = self.open(name)
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)

    def is_own_folder(self, name: str) -> bool:
        """Whether it is a folder, and not a link to one, which could form a cycle."""
        try:
            fd = open_beneath(self._top, name)
        except OSError:
            return False
        try:
            return stat.S_ISDIR(os.fstat(fd).st_mode)
        finally:
            os.close(fd)

    def names(self, name: str) -> list[str]:
        """Return the entries of a folder."""
        listed = reopened(self.open(name), os.O_DIRECTORY)
        try:
            with os.scandir(listed) as entries:
                found = [entry.name for entry in itertools.islice(entries, MOST_ENTRIES + 1)]
        finally:
            os.close(listed)
        if len(found) > MOST_ENTRIES:
            raise CheckpointError(f"{self.shown(name)} holds more than {MOST_ENTRIES} files; name a folder in it")
        return sorted(found)

    def held(self, name: str) -> int:
        """Return a descriptor of the file, which stays open until MOST_OPEN others have been requested.

        Raises CheckpointError for a pipe, a device or a sparse file, and if the name now has another file.
        """
        fd = self._open.pop(name, -1)
        if fd < 0:
            fd = self._first(name) if name not in self._seen else self._again(name)
            if len(self._open) == MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
        self._open[name] = fd
        return fd

    def _first(self, name: str) -> int:
        fd = self._regular(name)
        try:
            self._seen[name] = _looked_at(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _again(self, name: str) -> int:
        try:
            fd = self._regular(name)
        except OSError as error:
            raise self._changed(name) from error
        if _differs(self._seen[name], os.fstat(fd)):
            os.close(fd)
            raise self._changed(name)
        return fd

    def read(self, name: str, most: int) -> bytes:
        """Return the contents of a small file. Raises CheckpointError if it is too large, or changes meanwhile."""
        fd = self._regular(name)
        with open(fd, "rb") as file:
            before = _looked_at(fd)
            if before.st_size > most:
                raise CheckpointError(
                    f"{self.shown(name)} has {before.st_size} bytes; at most {most} are read of such a file"
                )
            self._spend(before.st_size)
            data = file.read(before.st_size + 1)
            if len(data) != before.st_size or _differs(before, os.fstat(fd)):
                raise self._changed(name)
        self._require_few_values(name, data)
        return data

    def read_part(self, name: str, start: int, size: int) -> bytes:
        """Return a part of a large file, for parsing. Raises CheckpointError if it is truncated or holds too much."""
        self._spend(size)
        data = os.pread(self.held(name), size, start)
        if len(data) != size:
            raise CheckpointError(f"{self.shown(name)} ends before byte {start + size}: it is truncated")
        self._require_few_values(name, data)
        return data

    def _spend(self, size: int) -> None:
        self._left -= max(size, _PAGE)
        if self._left < 0:
            raise CheckpointError(
                f"{self.where} has more than {MOST_PARSED} bytes of indexes, manifests and headers, with a page for "
                "each file: name a folder of one checkpoint, or save into fewer files"
            )

    def _require_few_values(self, name: str, data: bytes) -> None:
        values = sum(data.count(mark) for mark in (b"[", b"{", b":", b","))
        if values > MOST_VALUES:
            raise CheckpointError(f"{self.shown(name)} holds about {values} values; at most {MOST_VALUES} are read")

    def _regular(self, name: str) -> int:
        fd = self.open(name)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise CheckpointError(f"{self.shown(name)} is not a regular file, and only regular files are read")
        except BaseException:
            os.close(fd)
            raise
        file = reopened(fd)
        info = os.fstat(file)
        if info.st_size >= _SPARSE and info.st_blocks * 512 < info.st_size // 8 and _has_hole(file, info.st_size):
            os.close(file)
            raise CheckpointError(
                f"{self.shown(name)} says that it has {info.st_size} bytes, of which {info.st_blocks * 512} are on the "
                "disk: it is not whole, or made to fill the memory; copy it again"
            )
        return file

    def require_unchanged(self) -> None:
        for name, before in self._seen.items():
            if _differs(before, os.fstat(self.held(name))):
                raise self._changed(name)

    def _changed(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self.shown(name)} was changed while it was read: try again when nobody writes into it, and replace a "
            "file by renaming a whole one"
        )


def _has_hole(file: int, size: int) -> bool:
    """Whether a part of the file was never written; False if the file system does not report it."""
    try:
        return os.lseek(file, 0, os.SEEK_HOLE) < size
    except OSError:
        return False
    finally:
        os.lseek(file, 0, os.SEEK_SET)


def _looked_at(fd: int) -> os.stat_result:
    """Return what later shows whether the file was written to; waits briefly if it was changed just now."""
    info = os.fstat(fd)
    if 0 <= time.time_ns() - max(info.st_mtime_ns, info.st_ctime_ns) < _TICK:
        time.sleep(_TICK / 1e9)
        info = os.fstat(fd)
    return info


def _differs(before: os.stat_result, after: os.stat_result) -> bool:
    """Whether it is another file, or was written to.

    The change time (ctime), which nobody can set back, counts only while the number of links is unchanged: it also
    moves when a newer checkpoint is renamed over this one, which may still be read. So a writer that resets the write
    time and removes the name is not detected, nor is a store into a mapping whose page was already dirty
    (``artifact/verified.py``): these can only change numbers, which were that writer's to choose.
    """

    def known(info: os.stat_result) -> tuple[int, ...]:
        return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns

    changed = before.st_nlink == after.st_nlink and before.st_ctime_ns != after.st_ctime_ns
    return changed or known(before) != known(after)


@dataclass(frozen=True)
class BeneathPath(os.PathLike[str]):
    """A name below an open folder; see :func:`opened_beneath`.

    Reading raises CheckpointError for what lies outside, is not a regular file, or changes while it is read.
    """

    _place: _Place = field(repr=False)
    _name: str = ""

    def __str__(self) -> str:
        return self._place.shown(self._name)

    def __fspath__(self) -> str:
        """The file, under a name that cannot be redirected; open it immediately."""
        try:
            return f"/proc/self/fd/{self._place.held(self._name)}"
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self)) from None

    def __truediv__(self, name: str | os.PathLike[str]) -> BeneathPath:
        return BeneathPath(self._place, str(PurePosixPath(self._name) / name))

    def __lt__(self, other: BeneathPath) -> bool:
        return self._name < other._name

    @property
    def name(self) -> str:
        return PurePosixPath(str(self)).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> BeneathPath:
        parent = str(PurePosixPath(self._name).parent)
        return BeneathPath(self._place, "" if parent == "." else parent)

    def stat(self) -> os.stat_result:
        return self._place.stat(self._name)

    def _is(self, kind: int) -> bool:
        try:
            return stat.S_IFMT(self.stat().st_mode) == kind
        except OSError:
            return False

    def is_file(self) -> bool:
        return self._is(stat.S_IFREG)

    def is_dir(self) -> bool:
        return self._is(stat.S_IFDIR)

    def iterdir(self) -> Iterator[BeneathPath]:
        for name in self._place.names(self._name):
            yield self / name

    def names_below(self, folder: str = "") -> Iterator[str]:
        """Yield the names of everything in a folder and its subfolders (not through links), relative to it."""
        waiting = [""]
        while waiting:
            within = waiting.pop()
            try:
                names = self._place.names(str(PurePosixPath(self._name, folder, within)))
            except OSError:  # it was deleted meanwhile
                continue
            for name in names:
                below = f"{within}/{name}" if within else name
                yield below
                if self._place.is_own_folder(str(PurePosixPath(self._name, folder, below))):
                    waiting.append(below)

    def glob(self, pattern: str) -> Iterator[BeneathPath]:
        """Yield the folder's entries whose names match ``pattern``, which has no slash."""
        return (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    def read_bytes(self, most: int = MOST_TEXT) -> bytes:
        return self._place.read(self._name, most)

    def read_part(self, start: int, size: int) -> bytes:
        """Like :meth:`read_bytes`, for a part of a large file, at most MOST_TEXT bytes."""
        return self._place.read_part(self._name, start, size)

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill ``buffer`` with the file's contents from byte ``start`` on."""
        file, done = self._place.held(self._name), 0
        while done < len(buffer):
            count = os.preadv(file, [buffer[done:]], start + done)
            if count == 0:
                raise CheckpointError(f"{self} ends before byte {start + len(buffer)}: it was truncated")
            done += count

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def require_unchanged(self) -> None:
        """Raise CheckpointError if a file that was read has changed since it was opened."""
        self._place.require_unchanged()


def require_unchanged(read: object) -> None:
    """Do the same for the source of any weights, if it is such a path."""
    if isinstance(read, BeneathPath):
        read.require_unchanged()


AnyPath = Path | BeneathPath


def as_path(path: str | os.PathLike[str]) -> AnyPath:
    """Return a path of either kind for a caller's argument."""
    return path if isinstance(path, BeneathPath) else Path(path)


@contextlib.contextmanager
def opened_beneath(root: Path, name: str) -> Iterator[BeneathPath]:
    """Open the file or folder ``name`` below ``root`` for the block; no component may be a link.

    Raises OSError if it does not exist or has become a link meanwhile.
    """
    place = _Place(os.path.realpath(root), name)
    try:
        yield BeneathPath(place)
    finally:
        place.close()
