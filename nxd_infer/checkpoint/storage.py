"""Storage of checkpoints: a folder of a file system, or any store that fsspec supports (``s3://bucket/prefix``).

Names are relative to the root and use forward slashes: ``step_100/manifest.json``. Both kinds write a name completely
or not at all. Only a file system can rename; a checkpoint in a store is written under its final name, and is complete
once its ``done`` exists.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from nxd_infer.checkpoint.store_url import URL, connect, typed_errors
from nxd_infer.errors import CheckpointError
from nxd_infer.layout.files.atomic import REMOVING, replacing, sync_directory
from nxd_infer.layout.files.manifest import DONE

__all__ = ["LocalStorage", "RemoteStorage", "Storage", "storage_of"]


class LocalStorage:
    """A folder shared by all ranks. Not fsspec's, which neither syncs what it writes nor replaces atomically."""

    local = True

    def __init__(self, root: str | os.PathLike[str]):
        self.root = Path(root)

    def where(self, name: str = "") -> str:
        """Return the name for messages."""
        return str(self.root / name)

    def folders(self) -> list[str]:
        """Return the names of the folders at the root."""
        if not self.root.is_dir():
            return []
        with os.scandir(self.root) as entries:
            return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith(REMOVING))

    def files(self, folder: str) -> dict[str, int]:
        """Return the size of every file in a folder, including subfolders, by relative name."""
        found = {}
        for path in sorted((self.root / folder).rglob("*")):
            with contextlib.suppress(FileNotFoundError):  # a temporary file, renamed meanwhile
                if path.is_file():
                    found[path.relative_to(self.root / folder).as_posix()] = path.stat().st_size
        return found

    def read(self, name: str) -> bytes:
        """Return the contents. Raises FileNotFoundError."""
        return (self.root / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        with replacing(self.root / name) as temporary:
            temporary.write_bytes(data)

    def path(self, name: str) -> Path:
        """Return the path of a file with the contents, to be opened."""
        return self.root / name

    @contextlib.contextmanager
    def writing(self, folder: str, last: str) -> Iterator[Path]:
        """Yield a folder whose files are in ``folder`` afterwards; ``last`` never appears before the others."""
        yield self.root / folder

    def make(self, folder: str) -> None:
        (self.root / folder).mkdir(parents=True)

    def remove(self, folder: str) -> None:
        """Remove a folder: first from the list, in one step, then its files one by one."""
        _delete(self._set_aside(folder))

    def replace(self, old: str, new: str) -> None:
        """Rename a folder, replacing any folder with the new name."""
        aside = self._set_aside(new) if (self.root / new).exists() else None
        os.rename(self.root / old, self.root / new)
        sync_directory(self.root)
        if aside is not None:
            _delete(aside)

    def _set_aside(self, folder: str) -> Path:
        """Give a folder the name of one that is being removed; an earlier one may still be there."""
        aside = self.root / f"{REMOVING}{folder}.{secrets.token_hex(4)}"
        os.rename(self.root / folder, aside)
        sync_directory(self.root)
        return aside

    def tidy_up(self) -> None:
        """Finish the removals of killed processes, and those that failed."""
        self.root.mkdir(parents=True, exist_ok=True)
        for folder in self.root.iterdir():
            if folder.name.startswith(REMOVING):
                _delete(folder)


def _delete(aside: Path) -> None:
    """Delete a folder that is aside, as far as possible: on NFS, files that a reader has open stay until it ends."""
    shutil.rmtree(aside, ignore_errors=True)


class RemoteStorage:
    """A folder of any store that fsspec supports, by its URL: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ...

    Credentials, region and endpoint come from the environment of the store's tools (such as ``AWS_ENDPOINT_URL``).
    Raises CheckpointError if the store's package is not installed, and for every error of the store.
    """

    local = False

    def __init__(self, url: str):
        scheme, _, rest = url.partition(":")
        self._url = url.rstrip("/") if "://" in url else f"{scheme}://{rest.strip('/')}"
        self._fs, self._root = connect(self._url)
        self._copies: tempfile.TemporaryDirectory[str] | None = None

    def where(self, name: str = "") -> str:
        return f"{self._url}/{name}" if name else self._url

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def folders(self) -> list[str]:
        with typed_errors(self.where()):
            self._fs.invalidate_cache()  # other processes write there too
            try:
                entries = self._fs.ls(self._path(""), detail=True)
            except FileNotFoundError as error:
                if error.__cause__ is None:
                    return []
                # The store reports that there is no such bucket: do not treat a misspelled one as an empty folder.
                raise CheckpointError(f"{self._url}: {error}") from error
        return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory")

    def files(self, folder: str) -> dict[str, int]:
        base = self._path(folder)
        with typed_errors(self.where(folder)):
            self._fs.invalidate_cache()
            found = self._fs.find(base, detail=True)
        return {path[len(base) + 1 :]: info["size"] for path, info in found.items() if info["type"] == "file"}

    def read(self, name: str) -> bytes:
        with typed_errors(self.where(name)):
            return self._fs.cat_file(self._path(name))

    def write(self, name: str, data: bytes) -> None:
        with self._writing_to(name) as file:
            file.write(data)

    @contextlib.contextmanager
    def _writing_to(self, name: str) -> Iterator[IO[bytes]]:
        """Yield a file of the store to write to; it exists once it is closed."""
        path = self._path(name)
        with typed_errors(self.where(name)):
            try:
                file = self._fs.open(path, "wb")
            except FileNotFoundError:  # a store with real folders, such as sftp
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                file = self._fs.open(path, "wb")
            with file:
                yield file

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), typed_errors(self.where(name)):
            self._fs.rm_file(self._path(name))

    def path(self, name: str) -> Path:
        """Return a local copy, kept as long as this object."""
        if self._copies is None:
            self._copies = tempfile.TemporaryDirectory(prefix="nxd-checkpoint-")
        copy = Path(self._copies.name) / name
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            with typed_errors(self.where(name)), replacing(copy) as temporary:
                self._fs.get_file(self._path(name), str(temporary))
        return copy

    @contextlib.contextmanager
    def writing(self, folder: str, last: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="nxd-checkpoint-") as place:
            yield Path(place)
            names = [path.relative_to(place).as_posix() for path in sorted(Path(place).rglob("*")) if path.is_file()]
            for name in sorted(names, key=lambda name: name == last):
                with open(Path(place) / name, "rb") as data, self._writing_to(f"{folder}/{name}") as file:
                    shutil.copyfileobj(data, file, _BLOCK)

    def make(self, folder: str) -> None:
        """Do nothing: a folder exists with its first file."""

    def remove(self, folder: str) -> None:
        for name in sorted(self.files(folder), key=lambda name: name != DONE):  # DONE first: then it is incomplete
            self.delete(f"{folder}/{name}")

    def replace(self, old: str, new: str) -> None:
        raise CheckpointError(f"{self.where(old)} cannot be renamed: few stores have folders")

    def tidy_up(self) -> None:
        """Do nothing: files are removed one by one, ``done`` first."""


Storage = LocalStorage | RemoteStorage
_BLOCK = 1 << 20


def storage_of(path: str | os.PathLike[str]) -> Storage:
    """Return the storage of ``path``: a folder, or the URL of any store that fsspec supports.

    Raises CheckpointError for other URLs, such as fsspec's chains: a cache would show outdated contents.
    """
    text = os.fspath(path)
    found = URL.match(text)
    if found is None:
        if "://" in text:
            raise CheckpointError(f"{text!r} is not a URL of one store; give it as s3://bucket/prefix")
        return LocalStorage(text)
    return LocalStorage(text[found.end() - 1 :]) if found[1] else RemoteStorage(text)
