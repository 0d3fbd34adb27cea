"""Verify files, and recognise verified ones by their stamps when a rank, or another server, starts later.

Hashing gigabytes again at every start would double the start time. A file is not hashed again if its inode,
size and times are unchanged: every write sets a file's change time (ctime), which only an administrator can set back.
A file with another stamp is hashed, and rejected if it differs. This misses a store into a writable mapping whose page
has been dirty since before the hash: detecting it would mean waiting for the disk at every start.

Servers remember stamps of weights in the cache until the machine starts again, because a disk may lose what memory has.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from blake3 import blake3

from nxd_infer.artifact.manifest import FileSpec
from nxd_infer.artifact.writer import hash_open_file, on_every_core
from nxd_infer.errors import ArtifactCorruptError, CacheUnavailableError, UntrustedCacheError
from nxd_infer.util.cache_dir import cache_dir, opened
from nxd_infer.util.reading import parse_json

Stamp = list[int]
"""Device, inode, size, and the times of the last write and change in nanoseconds."""


def verify_files(root: Path, files: Mapping[str, FileSpec], names: Iterable[str]) -> dict[str, Stamp]:
    """Hash ``names`` of ``files`` below ``root``, and return their stamps.

    Raises ArtifactCorruptError naming a file that differs from its record in ``files``.
    """
    names = list(names)
    stamps = on_every_core(lambda name: _verify_file(root, name, files[name]), names)
    return dict(zip(names, stamps, strict=True))


def unchanged(path: Path, stamp: Stamp) -> bool:
    """Whether the file has this stamp."""
    try:
        return _stamp_of(os.stat(path)) == stamp
    except OSError:
        return False


def recalled(root: Path, files: Mapping[str, FileSpec]) -> dict[str, Stamp]:
    """Return the stamps of the ``files`` below ``root`` that :func:`remember` has, for these contents, and that are
    unchanged; empty if they cannot be read."""
    found: dict[str, Stamp] = {}
    with contextlib.suppress(*_UNREADABLE), opened(_record(root)) as file:
        record = parse_json(file.read())
        for name, (checksum, stamp) in record["files"].items() if record["boot"] == _boot() else ():
            if name in files and files[name].blake3 == checksum and unchanged(root / name, stamp):
                found[name] = stamp
    return found


def remember(root: Path, files: Mapping[str, FileSpec], stamps: Mapping[str, Stamp], begin: int) -> None:
    """Record that ``files`` below ``root`` had these ``stamps`` when they were verified, which began at ``begin``
    (``time.time_ns()``), if there is a cache. Those that had just been written then are left out: a file system's clock
    may not show that they changed again."""
    young = begin - _YOUNG
    kept = {name: (files[name].blake3, stamp) for name, stamp in stamps.items() if stamp[-1] < young}
    with contextlib.suppress(*_UNREADABLE):
        path = _record(root)
        fd, temporary = tempfile.mkstemp(dir=path.parent)  # for its owner alone
        with open(fd, "w") as file:
            json.dump({"boot": _boot(), "files": kept}, file)
        os.replace(temporary, path)


_YOUNG = 2_000_000_000
"""Nanoseconds: FAT, the coarsest, counts in two seconds."""
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, CacheUnavailableError, UntrustedCacheError)


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()


def _record(root: Path) -> Path:
    return cache_dir("verified") / f"{hashlib.sha256(os.fsencode(root)).hexdigest()[:32]}.json"


@contextlib.contextmanager
def stamps_file(stamps: Mapping[str, Stamp]) -> Iterator[int]:
    """Yield the descriptor of an unnamed file that holds ``stamps``, for ranks to read."""
    fd = os.memfd_create("nxd-stamps", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(json.dumps(stamps).encode())
        yield fd
    finally:
        os.close(fd)


def read_stamps(fd: int) -> dict[str, Stamp]:
    """Read what :func:`stamps_file` wrote. Several processes may do so at once: pread ignores the shared position."""
    return json.loads(os.pread(fd, os.fstat(fd).st_size, 0))


def _verify_file(root: Path, name: str, spec: FileSpec) -> Stamp:
    try:
        with open(root / name, "rb", buffering=0) as file:
            stamp = _stamp_of(os.fstat(file.fileno()))
            actual = hash_open_file(file, blake3.AUTO)
    except OSError as error:
        raise ArtifactCorruptError(f"{name} of {root} cannot be read: {error.strerror}") from error
    if actual.blake3 != spec.blake3:
        raise ArtifactCorruptError(
            f"{name} of {root} is altered: blake3 {actual.blake3[:16]}..., recorded {spec.blake3[:16]}..."
        )
    return stamp


def _stamp_of(info: os.stat_result) -> Stamp:
    """Return the values that identify a file that was neither written to nor renamed."""
    return [info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns]
