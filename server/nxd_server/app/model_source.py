"""What ``serve`` is given: a directory, or a folder of a store that fsspec knows, with an artifact or a model in it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from nxd_infer.artifact.manifest import MANIFEST_NAME
from nxd_infer.checkpoint.remote import URL, connect, typed_errors
from nxd_infer.errors import ArtifactError, ArtifactSpaceError
from nxd_infer.hugging_face.gguf_file import find_gguf
from nxd_infer.util.units import size

logger = logging.getLogger("nxd_server")

CONFIG = "config.json"
_OF_MODELS = {".json", ".jinja", ".model", ".safetensors", ".txt"}
"""What a trace may read of a model directory. Other files hold the same weights again (``.bin``, ``.gguf``)."""
_VERSIONS = ("ETag", "etag", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified", "modified", "created")
"""The field by which a store tells one content of a file from another, the surest first."""


class File(NamedTuple):
    """A file of a source: its bytes, and what changes when its contents do."""

    nbytes: int
    version: str


class LocalSource:
    """A directory."""

    def __init__(self, root: Path):
        self.root = root
        self.name = root.absolute().name
        self.gguf = find_gguf(root)

    def __str__(self) -> str:
        return str(self.root)

    def has(self, name: str) -> bool:
        return (self.root / name).is_file()

    def model_files(self) -> dict[str, File]:
        """What a trace may read, by name."""
        paths = sorted(self.root.rglob("*")) if self.gguf is None else [self.gguf]
        found = {}
        for path in paths:
            name = path.relative_to(self.root).as_posix()
            if path.is_file() and (path == self.gguf or _is_of_a_model(name)):
                info = path.stat()
                found[name] = File(info.st_size, str(info.st_mtime_ns))
        return found


class StoredSource:
    """A folder of a store, by its URL. Raises CheckpointError for what the store refuses, ArtifactError where the
    folder holds nothing."""

    def __init__(self, url: str):
        self._store, self._root = connect(url)
        self.url = url.rstrip("/")
        self.name = self.url.rpartition("/")[2]
        with typed_errors(self.url):
            found = self._store.find(self._root, detail=True)
        self._files: dict[str, dict[str, Any]] = {
            path[len(self._root) :].lstrip("/"): info for path, info in found.items() if info["type"] == "file"
        }
        if not self._files:
            raise ArtifactError(f"{self.url} holds no files: give the URL of an artifact's or a model's folder")

    def __str__(self) -> str:
        return self.url

    def has(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str) -> bytes:
        with typed_errors(f"{self.url}/{name}"):
            return self._store.cat_file(f"{self._root}/{name}")

    def model_files(self) -> dict[str, File]:
        """As of a directory."""
        return {name: self._file(name) for name in sorted(self._files) if _is_of_a_model(name)}

    def _file(self, name: str) -> File:
        info = self._files[name]
        version = next((str(info[field]) for field in _VERSIONS if info.get(field)), None)
        if version is None:
            raise ArtifactError(
                f"the store of {self.url} does not say when {name} changed, so what is traced of it cannot be kept: "
                "trace it yourself (`nxd-infer trace`), and give the artifact"
            )
        return File(info["size"], version)

    def fetch(self, names: Iterable[str], to: Path) -> None:
        """Copy files below ``to``, whose directory is there. Raises ArtifactSpaceError, CheckpointError."""
        names = list(names)
        needed = sum(self._files[name]["size"] for name in names)
        free = shutil.disk_usage(to).free
        if needed > free:
            raise ArtifactSpaceError(
                f"{self.url} has {size(needed)}, and {to} has room for {size(free)}: make room there, or name another "
                "directory with --keep (NXD_INFER_KEEP)"
            )
        logger.info("fetching %s: %d files, %s", self.url, len(names), size(needed))
        for name in names:
            (to / name).parent.mkdir(parents=True, exist_ok=True)
        with typed_errors(self.url):
            self._store.get([f"{self._root}/{name}" for name in names], [str(to / name) for name in names])


Source = LocalSource | StoredSource


def source_of(given: str) -> Source:
    """The directory or the folder of a store that ``given`` names."""
    found = URL.match(given)
    if found is None:
        return LocalSource(Path(given))
    return LocalSource(Path(given[found.end() - 1 :])) if found[1] else StoredSource(given)


def kind_of(source: Source) -> str | None:
    """Which of MANIFEST_NAME (an artifact) and CONFIG (a model to trace, also a GGUF file) it holds, or None."""
    if isinstance(source, LocalSource) and source.gguf is not None:
        return CONFIG
    return next((name for name in (MANIFEST_NAME, CONFIG) if source.has(name)), None)


def _is_of_a_model(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix in _OF_MODELS and not any(part.startswith(".") for part in path.parts)
