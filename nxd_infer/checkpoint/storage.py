"""Where checkpoints lie: in a folder of a file system, or under a prefix of an S3 bucket (``s3://bucket/prefix``).

Names are relative to the root and have forward slashes: ``step_100/manifest.json``. What is written under a name is
there whole or not at all in both. Only a file system can rename; a checkpoint in a bucket is written under the name
that it keeps, and is whole once its ``done`` is there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from nxd_infer.errors import CheckpointError
from nxd_infer.layout.files.files import REMOVING, replacing, sync_directory
from nxd_infer.layout.files.manifest import DONE
from nxd_infer.util.beneath import MOST_TEXT, AnyPath, BeneathPath

__all__ = ["LocalStorage", "S3Storage", "Sign", "Storage", "storage_of"]


MOST_MARK = 4096
"""Bytes of DONE: a checksum and a number."""


class Sign(Protocol):
    """Told of bytes that were dealt with, so that others see a long save go on; ``end`` before its last file."""

    def __call__(self, count: int, /) -> None: ...

    def end(self) -> None: ...


class LocalStorage:
    """A folder that all ranks share."""

    local = True

    def __init__(self, root: str | os.PathLike[str]):
        self.root = Path(root)

    def where(self, name: str = "") -> str:
        """What a message calls it."""
        return str(self.root / name)

    def folders(self) -> list[str]:
        """The names of the folders at the root."""
        if not self.root.is_dir():
            return []
        with os.scandir(self.root) as entries:
            return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith(REMOVING))

    def files(self, folder: str) -> dict[str, int]:
        """The bytes of every file of a folder, also of those below it, by name relative to it."""
        found = {}
        for path in sorted((self.root / folder).rglob("*")):
            with contextlib.suppress(FileNotFoundError):  # a temporary file, renamed meanwhile
                if path.is_file():
                    found[path.relative_to(self.root / folder).as_posix()] = path.stat().st_size
        return found

    def read(self, name: str) -> bytes:
        """The contents. Raises FileNotFoundError."""
        return (self.root / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        with replacing(self.root / name) as temporary:
            temporary.write_bytes(data)

    def delete(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    def path(self, name: str) -> AnyPath:
        """A file to open that has the contents."""
        return self.root / name

    @contextlib.contextmanager
    def writing(self, folder: str, last: str, sign: Sign | None = None) -> Iterator[Path]:
        """A folder to put files into, which are in ``folder`` afterwards; ``last`` never before the others."""
        yield self.root / folder

    def make(self, folder: str) -> None:
        (self.root / folder).mkdir(parents=True)

    def remove(self, folder: str) -> None:
        """Take it out of the list in one step, before its files go one by one."""
        aside = self.root / f"{REMOVING}{folder}"
        os.rename(self.root / folder, aside)
        sync_directory(self.root)
        shutil.rmtree(aside)

    def replace(self, old: str, new: str) -> None:
        """Rename a folder, in place of what has the new name."""
        aside = self.root / f"{REMOVING}{new}"
        replaced = (self.root / new).exists()
        if replaced:
            os.rename(self.root / new, aside)
            sync_directory(self.root)
        os.rename(self.root / old, self.root / new)
        sync_directory(self.root)
        if replaced:
            shutil.rmtree(aside)

    def tidy_up(self) -> None:
        """Finish what a killed process was removing."""
        self.root.mkdir(parents=True, exist_ok=True)
        for folder in self.root.iterdir():
            if folder.name.startswith(REMOVING):
                shutil.rmtree(folder)


class OpenedStorage(LocalStorage):
    """A folder that is open, to be read."""

    def __init__(self, opened: BeneathPath):
        super().__init__(str(opened))
        self._opened = opened

    def folders(self) -> list[str]:
        if not self._opened.is_dir():
            return []
        return [path.name for path in self._opened.iterdir() if not path.name.startswith(REMOVING) and path.is_dir()]

    def files(self, folder: str) -> dict[str, int]:
        found = {}
        for name in self._opened.names_below(folder):
            with contextlib.suppress(OSError):  # a temporary file, renamed meanwhile
                info = (self._opened / folder / name).stat()
                if stat.S_ISREG(info.st_mode):
                    found[name] = info.st_size
        return found

    def read(self, name: str) -> bytes:
        return (self._opened / name).read_bytes(MOST_MARK if PurePosixPath(name).name == DONE else MOST_TEXT)

    def path(self, name: str) -> AnyPath:
        return self._opened / name


class S3Storage:
    """A prefix of a bucket. Credentials, region and ``AWS_ENDPOINT_URL`` are those of the environment, as for any tool.

    Raises CheckpointError without boto3, and for whatever the service refuses.
    """

    local = False

    def __init__(self, url: str):
        bucket, _, prefix = url.removeprefix("s3:").lstrip("/").partition("/")
        if not bucket:
            raise CheckpointError(f"{url!r} names no bucket; give s3://bucket/prefix")
        self.bucket, self.prefix = bucket, prefix.strip("/")
        self._s3 = _client(url)
        self._copies: tempfile.TemporaryDirectory[str] | None = None

    def where(self, name: str = "") -> str:
        return "s3://" + "/".join(part for part in (self.bucket, self.prefix, name) if part)

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def folders(self) -> list[str]:
        base = self._key("")
        return sorted(
            found["Prefix"][len(base) :].rstrip("/")
            for page in self._pages(Prefix=base, Delimiter="/")
            for found in page.get("CommonPrefixes", ())
        )

    def files(self, folder: str) -> dict[str, int]:
        base = self._key(f"{folder}/" if folder else "")
        return {
            found["Key"][len(base) :]: found["Size"]
            for page in self._pages(Prefix=base)
            for found in page.get("Contents", ())
        }

    def _pages(self, **arguments: str) -> Iterator[dict[str, Any]]:
        with self._told(""):
            yield from self._s3.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, **arguments)

    def read(self, name: str) -> bytes:
        with self._told(name):
            return self._s3.get_object(Bucket=self.bucket, Key=self._key(name))["Body"].read()

    def write(self, name: str, data: bytes) -> None:
        with self._told(name):
            self._s3.put_object(Bucket=self.bucket, Key=self._key(name), Body=data)

    def delete(self, name: str) -> None:
        with self._told(name):
            self._s3.delete_object(Bucket=self.bucket, Key=self._key(name))

    def path(self, name: str) -> Path:
        """A copy of it, kept as long as this object."""
        if self._copies is None:
            self._copies = tempfile.TemporaryDirectory(prefix="nxd-checkpoint-")
        copy = Path(self._copies.name) / name
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            with self._told(name), replacing(copy) as temporary:
                self._s3.download_file(self.bucket, self._key(name), str(temporary), Config=_in_this_thread())
        return copy

    @contextlib.contextmanager
    def writing(self, folder: str, last: str, sign: Sign | None = None) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="nxd-checkpoint-") as place:
            yield Path(place)
            names = [path.relative_to(place).as_posix() for path in sorted(Path(place).rglob("*")) if path.is_file()]
            for name in sorted(names, key=lambda name: name == last):
                if sign is not None and name == last:
                    sign.end()
                with self._told(f"{folder}/{name}"):
                    source, key = str(Path(place) / name), self._key(f"{folder}/{name}")
                    shown = sign if name != last else None
                    self._s3.upload_file(source, self.bucket, key, Callback=shown, Config=_in_this_thread())

    def make(self, folder: str) -> None:
        """Nothing: a bucket has no folders."""

    def remove(self, folder: str) -> None:
        for name in sorted(self.files(folder), key=lambda name: name != "done"):  # first: it is no checkpoint any more
            self.delete(f"{folder}/{name}")

    def replace(self, old: str, new: str) -> None:
        raise CheckpointError(f"{self.where(old)} cannot be renamed: a bucket has no folders")

    def tidy_up(self) -> None:
        """Nothing: what is removed is removed file by file, ``done`` first."""

    @contextlib.contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Raise what goes wrong as FileNotFoundError or CheckpointError, with the name."""
        import boto3.exceptions
        import botocore.exceptions

        try:
            yield
        except botocore.exceptions.ClientError as error:
            if error.response.get("Error", {}).get("Code") in ("NoSuchKey", "404"):
                raise FileNotFoundError(f"{self.where(name)} does not exist") from error
            raise CheckpointError(f"{self.where(name)}: {error}") from error
        except (botocore.exceptions.BotoCoreError, boto3.exceptions.Boto3Error) as error:
            raise CheckpointError(f"{self.where(name)}: {error}") from error


Storage = LocalStorage | S3Storage


def storage_of(path: str | os.PathLike[str]) -> Storage:
    """What ``path`` names: ``s3://bucket/prefix``, or a folder."""
    if isinstance(path, BeneathPath):
        return OpenedStorage(path)
    text = os.fspath(path)
    return S3Storage(text) if text.startswith("s3:/") else LocalStorage(text)  # a Path has one slash


def _client(url: str) -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ModuleNotFoundError as error:
        raise CheckpointError(f"{url} needs {error.name}: pip install 'nxd-infer[s3]'") from error
    config = Config(
        connect_timeout=10,
        read_timeout=60,
        request_checksum_calculation="when_required",  # our own sha256 covers every file; old servers know no other
        response_checksum_validation="when_required",
    )
    return boto3.client("s3", config=config)


def _in_this_thread() -> Any:
    """An asynchronous save may go on while the interpreter ends, which refuses new threads."""
    from boto3.s3.transfer import TransferConfig

    return TransferConfig(use_threads=False)
