"""Write an artifact such that a partial one is never loadable: into a temporary directory, renamed when complete.

The writer fills a hidden temporary directory next to the target. ``commit`` hashes and fsyncs every file, writes
``manifest.json`` last, and renames the directory into place; an existing artifact is exchanged in one system call
if the file system supports it (``renameat2``). Any exception, including an interrupt, removes the temporary directory.
Directories of killed writers are removed by the next writer: a live writer holds a lock on its directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import hashlib
import io
import json
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from nxd_infer.artifact.manifest import MANIFEST_NAME, FileSpec, Manifest
from nxd_infer.errors import ArtifactCorruptError, ArtifactError, ArtifactSpaceError
from nxd_infer.util.dtypes import SAFETENSORS_DTYPES
from nxd_infer.util.machine import processors
from nxd_infer.util.reading import checksum_and_size
from nxd_infer.util.units import size

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

CHECKSUM_KEY = "manifest_sha256"
"""Checksum of the manifest's other fields, which detects damage to the manifest itself."""

_YOUNG = 5.0
"""Seconds during which an unlocked temporary directory is assumed to be in use."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_TEXTS = ("no space left", "os error 28", "disk quota exceeded", "os error 122", "file too large", "os error 27")


def hash_file(path: Path) -> FileSpec:
    """Return size and checksum of one file; hashing releases the GIL, so files hash in parallel threads."""
    with open(path, "rb", buffering=0) as file:
        return hash_open_file(file)


def hash_open_file(file: io.FileIO, threads: int = 1) -> FileSpec:
    """Like :func:`hash_file`, for the rest of an open file."""
    checksum, nbytes = checksum_and_size(file, threads)
    return FileSpec(size=nbytes, blake3=checksum)


def on_every_core(read: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return ``read`` of each of ``items``, using one thread per core; for functions that release the GIL."""
    with ThreadPoolExecutor(max_workers=min(16, processors())) as pool:
        return list(pool.map(read, items))


def manifest_checksum(fields: Mapping[str, Any]) -> str:
    """Return the sha256 of the manifest's fields in canonical JSON, without the checksum itself."""
    rest = {key: value for key, value in fields.items() if key != CHECKSUM_KEY}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return the contents of ``manifest.json``, including the checksum."""
    fields = json.loads(manifest.model_dump_json())
    fields[CHECKSUM_KEY] = manifest_checksum(fields)
    return json.dumps(fields, indent=1, ensure_ascii=True).encode() + b"\n"


def check_weight_file(path: Path, manifest: Manifest) -> None:
    """Check that the file is safetensors and holds the manifest's weights with their dtypes and shapes.

    Only the header is read. Any other kind of file (such as a pickle) is rejected without being interpreted.
    """
    from safetensors import SafetensorError, safe_open

    name = f"weights/{path.name}"
    try:
        with safe_open(path, framework="np") as file:  # either framework would do: no tensor is created
            keys = set(file.keys())
            for weight in manifest.stored:
                if weight.name not in keys:
                    raise ArtifactCorruptError(f"{name} lacks the weight {weight.name!r}")
                piece = file.get_slice(weight.name)
                if list(piece.get_shape()) != weight.shape or SAFETENSORS_DTYPES.get(piece.get_dtype()) != weight.dtype:
                    raise ArtifactCorruptError(
                        f"{name}: {weight.name!r} is {piece.get_dtype()}{list(piece.get_shape())}, "
                        f"recorded {weight.dtype}{weight.shape}"
                    )
    except SafetensorError as error:
        raise ArtifactCorruptError(f"{name} is not a safetensors file ({error}); nothing else is ever read") from error


def checked_name(name: str) -> str:
    """Return ``name`` if it is a plain relative path inside its directory, else raise ArtifactCorruptError."""
    parts = PurePosixPath(name).parts
    plain = name == "/".join(parts) and ".." not in parts and "." not in parts
    if not name or not plain or name.startswith("/") or "\\" in name or "\0" in name:
        raise ArtifactCorruptError(f"{name!r} is not a path inside an artifact; refusing it")
    return name


class ArtifactWriter:
    """Write an artifact at ``target``, all or nothing.

    ::

        with ArtifactWriter("out") as writer:
            (writer.path / "graphs" / digest).mkdir(parents=True)     # write anything below writer.path,
            writer.write_safetensors("weights/rank_00.safetensors", tensors)
            writer.add("config.json", source_file)
            writer.commit(manifest)                                   # manifest.files is filled in here

    Leaving the block without ``commit``, by an exception or not, removes everything that was written.

    Raises ArtifactError if ``target`` exists and is neither an artifact nor an empty directory (nothing else is
    ever replaced), or exists at all with ``replace=False``; ArtifactSpaceError if the disk or a quota is full.
    """

    def __init__(self, target: str | os.PathLike[str], *, replace: bool = True):
        self.target = Path(os.path.abspath(target))
        self.replace = replace
        self._path: Path | None = None
        self._lock = -1
        self._known: dict[str, FileSpec] = {}

    @property
    def path(self) -> Path:
        """The temporary directory; write files and subdirectories here."""
        if self._path is None:
            raise ArtifactError("ArtifactWriter is used as a context manager: `with ArtifactWriter(target) as writer:`")
        return self._path

    def __enter__(self) -> ArtifactWriter:
        self.check_target()
        with _disk_errors(self.target):
            self.target.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(self.target)
            self._path = self.target.parent / f".{self.target.name}.tmp-{secrets.token_hex(6)}"
            try:
                self._path.mkdir()
                self._lock = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                with contextlib.suppress(OSError):  # NFS cannot lock directories, so nothing is cleaned up there
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BaseException:
                self.abandon()
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        full = isinstance(error, Exception) and is_disk_full(error)
        self.abandon()
        if full and not isinstance(error, ArtifactSpaceError):
            raise _space_error(self.target) from error

    def abandon(self) -> None:
        """Remove what was written. No effect after ``commit``."""
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            self._path = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def file(self, name: str) -> Path:
        """Return the path for the file ``name`` (a relative path with ``/``); creates its directory."""
        path = self.path / checked_name(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write_bytes(self, name: str, data: bytes) -> Path:
        path = self.file(name)
        path.write_bytes(data)
        return path

    def write_safetensors(self, name: str, tensors: Mapping[str, torch.Tensor]) -> Path:
        """Write ``tensors`` (each contiguous) as a safetensors file."""
        from nxd_infer.layout.files.stream import write_safetensors  # slow: torch

        path = self.file(name)
        with open(path, "wb") as file:
            write_safetensors(file, [(key, one.dtype, one.shape) for key, one in tensors.items()], tensors.__getitem__)
        return path

    def add(self, name: str, source: str | os.PathLike[str], *, link: bool = False, known: FileSpec | None = None):
        """Add a file as ``name``: a copy, or with ``link`` a hard link if the file system allows one.

        ``known`` is the size and checksum the source had when it was written. A linked file keeps them without being
        read again; a copy is hashed at ``commit`` and must match them.
        """
        path = self.file(name)
        if link:
            try:
                os.link(source, path, follow_symlinks=False)
            except OSError as error:
                if is_disk_full(error):
                    raise
            else:
                if known is not None and path.stat().st_size == known.size:
                    self._known[name] = known
                return path
        shutil.copyfile(source, path)
        if known is None:
            return path
        copied = hash_file(path)
        if copied != known:
            raise ArtifactCorruptError(
                f"{os.fspath(source)} differs from its checksum ({copied.size} bytes, blake3 {copied.blake3[:12]}..., "
                f"recorded {known.size} bytes, {known.blake3[:12]}...): it was changed after it was traced; trace again"
            )
        return path

    def commit(self, manifest: Manifest) -> Path:
        """Fill ``manifest.files``, make everything durable, write ``manifest.json`` and rename into place."""
        with _disk_errors(self.target):
            links = [path for path in self.path.rglob("*") if path.is_symlink()]
            if links:
                raise ArtifactError(f"an artifact holds no symbolic links, found {links[0].relative_to(self.path)}")
            files = {
                str(path.relative_to(self.path).as_posix()): path
                for path in sorted(self.path.rglob("*"))
                if path.is_file() and path != self.path / MANIFEST_NAME
            }
            new = [name for name in files if name not in self._known]
            hashed = dict(zip(new, on_every_core(hash_file, [files[name] for name in new]), strict=True))
            manifest.files = {name: hashed.get(name) or self._known[name] for name in files}
            mode = stat.S_IMODE(self.path.stat().st_mode) & 0o666  # according to the caller's umask
            for path in files.values():
                if stat.S_IMODE(path.stat().st_mode) != mode:
                    path.chmod(mode)
                _fsync(path)
            (self.path / MANIFEST_NAME).write_bytes(manifest_bytes(manifest))
            _fsync(self.path / MANIFEST_NAME)
            for directory in [*(p for p in self.path.rglob("*") if p.is_dir()), self.path]:
                _fsync(directory)
            self.check_target()
            other = _other_model(self.target, manifest)
            self._rename()
            _fsync(self.target.parent)
            if other:
                log.warning("%s: replaced the artifact of another model, %s", self.target, other)
        return self.target

    def _rename(self) -> None:
        """Move the finished directory to the target. From here on an interrupt leaves the old or the new one intact."""
        try:
            os.rename(self.path, self.target)  # to a new path, or onto an empty directory
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if self.replace:
                self._replace()
            else:
                raise ArtifactError(f"{self.target} has appeared meanwhile; choose another directory") from error
        self._path = None

    def _replace(self) -> None:
        if _exchange(self.path, self.target):
            shutil.rmtree(self.path, ignore_errors=True)
            return
        # Two steps if the file system cannot exchange. Later writers do not remove a directory with this name, so a
        # crash between the two steps leaves the old artifact there.
        old = self.target.parent / f".{self.target.name}.old-{secrets.token_hex(6)}"
        try:
            os.rename(self.target, old)
            os.rename(self.path, self.target)
        except BaseException:
            if not self.target.exists() and old.exists():
                os.rename(old, self.target)
            raise
        shutil.rmtree(old, ignore_errors=True)

    def check_target(self) -> None:
        """Raise ArtifactError if the target cannot be written, or what is there must not be replaced."""
        if os.path.lexists(self.target):
            self._check_replaceable()
        parent = next(place for place in (self.target, *self.target.parents) if os.path.exists(place))
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            kind = "is not writable" if parent.is_dir() else "is not a directory"
            raise ArtifactError(f"cannot write the artifact {self.target}: {parent} {kind}; choose another directory")

    def _check_replaceable(self) -> None:
        if not self.replace:
            raise ArtifactError(f"{self.target} exists already; remove it or choose another directory")
        if self.target.is_symlink() or not self.target.is_dir():
            raise ArtifactError(f"{self.target} exists and is not a directory; choose another place for the artifact")
        if os.path.ismount(self.target):
            raise ArtifactError(
                f"{self.target} is a mount point, which cannot be replaced in one step; give a directory below it"
            )
        entries = os.listdir(self.target)
        if entries and MANIFEST_NAME not in entries:
            raise ArtifactError(
                f"{self.target} holds {len(entries)} entries and no {MANIFEST_NAME}, so it is not an artifact; "
                "it is left alone: choose an empty or new directory"
            )


def _other_model(target: Path, manifest: Manifest) -> str:
    """Describe the artifact at ``target`` if it is of another model: of another name, or of weights of other names."""
    try:
        old = Manifest.model_validate_json((target / MANIFEST_NAME).read_bytes())
    except (OSError, ValueError):  # none, or a damaged one
        return ""
    name = old.metadata.get("model_name")
    weights = [{spec.name for spec in one.weights} for one in (old, manifest)]
    if name == manifest.metadata.get("model_name") and weights[0] == weights[1]:
        return ""
    whose = f"{name!r} (" if name else "("
    return f"{whose}{size(sum(file.size for file in old.files.values()))}, {len(old.weights)} weights)"


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two directories in one step (``renameat2`` with RENAME_EXCHANGE); False if that is not supported."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    here, exchange = -100, 2
    return rename(here, os.fsencode(first), here, os.fsencode(second), exchange) == 0


def _remove_abandoned(target: Path) -> None:
    """Remove temporary directories of killed writers: their locks are free."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.tmp-*"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if time.time() - os.fstat(fd).st_ctime < _YOUNG:
                continue  # its writer may not have taken the lock yet
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # in use, or possibly so
        finally:
            os.close(fd)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether ``error`` or its cause reports a full disk; not every library keeps the error number."""
    seen = 0
    while error is not None and seen < 8:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if not isinstance(error, OSError) and any(text in str(error).lower() for text in _FULL_TEXTS):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


def _space_error(target: Path) -> ArtifactSpaceError:
    try:
        free = f"{size(shutil.disk_usage(target.parent).free)} free"
    except OSError:
        free = "free space unknown"
    return ArtifactSpaceError(
        f"no space left while writing the artifact {target} ({free} after removing what was written); "
        "nothing of it is left: free space or choose another directory"
    )


@contextlib.contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    """Convert errors of the operating system about a full or unwritable disk to our errors."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise _space_error(target) from error
        raise ArtifactError(f"cannot write the artifact {target}: {error}") from error
