"""From the argument of ``serve`` to an artifact in a directory.

An artifact in a directory is served where it lies. One in a store is fetched first; a Hugging Face model directory,
here or in a store, is traced first. What that makes is kept below ``settings.keep``, whole or not at all, under a name
that follows from the contents: the next start finds it, and a model that has changed gets another. Servers that share
the directory (replicas with one volume) take turns: the first makes it, the others wait and find it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from nxd_infer.artifact.manifest import MANIFEST_NAME
from nxd_infer.artifact.reader import read_artifact
from nxd_infer.artifact.writer import checked_name
from nxd_infer.backends import registry
from nxd_infer.checkpoint.store_url import URL, connect, typed_errors
from nxd_infer.errors import ArtifactError, ArtifactSpaceError, NxdError
from nxd_infer.hugging_face.gguf_file import find_gguf
from nxd_infer.processes.child import ChildProcess, end_all
from nxd_infer.processes.command import child_environment, python_module
from nxd_infer.util.cache_dir import cache_dir
from nxd_infer.util.units import size
from nxd_infer.util.version import VERSION
from nxd_server.errors import SettingsError
from nxd_server.settings import ServerSettings

logger = logging.getLogger("nxd_server")

CONFIG = "config.json"
_OF_MODELS = {".json", ".jinja", ".model", ".safetensors", ".txt", ".bpe", ".codes", ".spm", ".tiktoken"}
"""What a trace may read of a model directory. Other files hold the same weights again (``.bin``, ``.gguf``)."""
_VERSIONS = ("ETag", "etag", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified", "modified", "created")
"""The field by which a store tells one content of a file from another, the surest first."""
STOP_SECONDS = 20.0
"""How long a trace may take to undo its work when the server is told to stop."""


# --- a directory, or a folder of a store that fsspec knows, with an artifact or a model in it ---


class LocalSource:
    """A directory, or a GGUF file."""

    def __init__(self, root: Path):
        if not root.exists():
            raise ArtifactError(
                f"{root} is missing: give an artifact (`nxd-infer trace` makes one), a Hugging Face model directory "
                "(one of the hub is fetched with `hf download`) or a GGUF file"
            )
        self.root = root
        self.name = root.absolute().name
        self.gguf = find_gguf(root)

    def __str__(self) -> str:
        return str(self.root)

    def has(self, name: str) -> bool:
        return (self.root / name).is_file()

    def model_files(self) -> dict[str, tuple[int, str]]:
        """What a trace may read, by name: its bytes, and what changes when its contents do."""
        names = {path.relative_to(self.root).as_posix(): path for path in sorted(self.root.rglob("*"))}
        paths = {name: path for name, path in names.items() if path.is_file() and _is_of_a_model(name)}
        if self.gguf is not None:
            paths = {self.gguf.relative_to(self.root).as_posix(): self.gguf}
        infos = {name: path.stat() for name, path in paths.items()}
        return {name: (info.st_size, str(info.st_mtime_ns)) for name, info in infos.items()}


class StoredSource:
    """A folder of a store, by its URL. Raises CheckpointError for what the store refuses, ArtifactError where the
    folder holds nothing."""

    def __init__(self, url: str):
        self._store, self._root = connect(url)
        self.url = url.rstrip("/")
        self.name = self.url.rpartition("/")[2]
        with typed_errors(self.url):
            entries = self._store.find(self._root, detail=True)
        self._files: dict[str, dict[str, Any]] = {
            path[len(self._root) :].lstrip("/"): info for path, info in entries.items() if info["type"] == "file"
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

    def model_files(self) -> dict[str, tuple[int, str]]:
        """As of a directory."""
        files: dict[str, tuple[int, str]] = {}
        for name in filter(_is_of_a_model, sorted(self._files)):
            info = self._files[name]
            version = next((str(info[field]) for field in _VERSIONS if info.get(field)), None)
            if version is None:
                raise ArtifactError(
                    f"the store of {self.url} does not say when {name} changed, so what is traced of it cannot be "
                    "kept: trace it yourself (`nxd-infer trace`), and give the artifact"
                )
            files[name] = info["size"], version
        return files

    def fetch(self, names: Sequence[str], to: Path) -> None:
        """Copy files below ``to``, whose directory is there. Raises ArtifactSpaceError, CheckpointError."""
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


def kind_of(source: LocalSource | StoredSource) -> str | None:
    """Which of MANIFEST_NAME (an artifact) and CONFIG (a model to trace, also a GGUF file) it holds, or None."""
    if isinstance(source, LocalSource) and source.gguf is not None:
        return CONFIG
    return next((name for name in (MANIFEST_NAME, CONFIG) if source.has(name)), None)


def _is_of_a_model(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix in _OF_MODELS and not any(part.startswith(".") for part in path.parts)


# --- the artifact of it ---


def prepare(given: str, settings: ServerSettings) -> Path:
    """The directory of the artifact that ``given`` names, fetched or traced first where it is none.

    Raises SettingsError, ArtifactError or CheckpointError that say what is wrong with ``given``, with the directory to
    keep things in, or with the trace.
    """
    url = URL.match(given)
    if url is not None and not url[1]:
        source = StoredSource(given)
    else:
        source = LocalSource(Path(given if url is None else given[url.end() - 1 :]))
    kind = kind_of(source)
    if isinstance(source, LocalSource) and kind != CONFIG:
        return source.root  # whoever reads it says what is wrong with it
    if kind is None:
        raise ArtifactError(
            f"{source} is neither an artifact, which has a {MANIFEST_NAME}, nor a Hugging Face model directory, which "
            f"has a {CONFIG}: give the folder of one of them"
        )
    if isinstance(source, StoredSource) and kind == MANIFEST_NAME:
        identity = source.read(MANIFEST_NAME)
    else:
        identity = _model_identity(source.model_files(), settings)
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", source.name).strip(".-")[:40] or "model"
    kept = _keep(source, settings) / f"{label}-{hashlib.sha256(identity).hexdigest()[:16]}"
    if _is_there(kept):
        return kept
    with _one_at_a_time(source, kept, settings):
        if _is_there(kept):
            return kept
        if isinstance(source, LocalSource):
            _trace(source.root, kept, settings)
            return kept
        with _fetched(source, label, kept) as here:
            if kind == CONFIG:
                _trace(here, kept, settings)
            else:
                read_artifact(here)  # what was damaged on the way must not be kept
                os.sync()  # all of it is on the disk before it has its name
                here.rename(kept)
    return kept


def _is_there(kept: Path) -> bool:
    found = (kept / MANIFEST_NAME).exists()
    if found:
        logger.info("%s was made by an earlier start", kept)
    return found


def _model_identity(files: Mapping[str, Any], settings: ServerSettings) -> bytes:
    """All that a traced artifact depends on: the model's files, the options, the versions of what traces."""
    from importlib.metadata import version  # slow to import; an artifact that is there needs none

    words = shlex.split(settings.trace_options)
    return json.dumps([files, words, VERSION, version("torch"), _compiler(words)], sort_keys=True).encode()


def _compiler(words: Sequence[str]) -> str:
    """The compiler of a trace with these options, with its version; empty if there is none."""
    named = [word for before, word in itertools.pairwise(words) if before == "--backend"]
    named += [word.removeprefix("--backend=") for word in words if word.startswith("--backend=")]
    try:
        backend = registry.get(named[-1] if named else registry.default())
        return backend.compiler() if backend.compiles else ""
    except NxdError:
        return ""  # the trace says what is missing


def _keep(source: LocalSource | StoredSource, settings: ServerSettings) -> Path:
    """The directory to keep artifacts in."""
    try:
        keep = settings.keep or cache_dir("artifacts")
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_keep(source, str(settings.keep or "the cache"), error) from error
    return keep


@contextlib.contextmanager
def _one_at_a_time(source: LocalSource | StoredSource, kept: Path, settings: ServerSettings) -> Iterator[None]:
    """Keep other servers from making ``kept`` meanwhile; wait while one of them does."""
    from filelock import FileLock  # slow to import

    lock = kept.with_name(f".{kept.name}.lock")
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(FileLock(lock, timeout=0))
        except TimeoutError:
            logger.info("another server makes %s; waiting for it", kept)
            try:
                held.enter_context(FileLock(lock, timeout=settings.prepare_timeout))
            except TimeoutError:
                raise SettingsError(
                    f"another server still makes {kept} after {settings.prepare_timeout:g} s: end it, or raise "
                    "--prepare-timeout (NXD_INFER_PREPARE_TIMEOUT)"
                ) from None
        except OSError as error:
            raise _cannot_keep(source, str(kept.parent), error) from error
        yield


def _cannot_keep(source: LocalSource | StoredSource, keep: str, error: OSError) -> SettingsError:
    return SettingsError(
        f"what is made of {source} cannot be kept in {keep}: {error.strerror or error}; make it a directory that user "
        f"{os.geteuid()} may write to, or name another with --keep (NXD_INFER_KEEP)"
    )


@contextlib.contextmanager
def _fetched(source: StoredSource, label: str, kept: Path) -> Iterator[Path]:
    """A directory beside ``kept`` with the files of the source, removed at the end where it is still there."""
    place = kept.with_name(f".fetching-{kept.name}")
    shutil.rmtree(place, ignore_errors=True)  # of a server that was killed
    here = place / label  # a traced artifact takes its model's name from it
    try:
        here.mkdir(parents=True)
        names = _artifact_files(source) if kind_of(source) == MANIFEST_NAME else list(source.model_files())
        source.fetch(names, here)
        yield here
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _artifact_files(source: StoredSource) -> list[str]:
    """The files that a manifest lists, and itself. Whatever else is wrong with it is told by whoever reads it."""
    try:
        listed = [checked_name(name) for name in json.loads(source.read(MANIFEST_NAME))["files"]]
    except (ValueError, TypeError, KeyError):
        raise ArtifactError(f"{source}/{MANIFEST_NAME} is damaged: it lists no files; copy the artifact anew") from None
    missing = [name for name in listed if not source.has(name)]
    if missing:
        raise ArtifactError(
            f"{source} lacks {missing[0]}, and has {len(listed) - len(missing)} of {len(listed)} files that its "
            f"{MANIFEST_NAME} lists: copy the artifact anew"
        )
    return [*listed, MANIFEST_NAME]


def _trace(model: Path, out: Path, settings: ServerSettings) -> None:
    """Run ``nxd-infer trace`` in a process of its own: the server's does without torch, and without its memory."""
    words = shlex.split(settings.trace_options)
    how = shlex.join(["nxd-infer", "trace", *words])
    logger.info("%s is a model, not an artifact: it is traced first (%s, into %s)", model, how, out)
    command = python_module("nxd_infer.cli.main", "trace", str(model), "--out", str(out), *words)
    child = ChildProcess(command, environment=child_environment())
    try:
        ended = child.wait(settings.prepare_timeout)
    except BaseException:  # a signal that ends the server
        end_all([child], patience=STOP_SECONDS)
        raise
    if not ended:
        end_all([child], patience=STOP_SECONDS)
        raise SettingsError(
            f"tracing {model} took more than {settings.prepare_timeout:g} s: raise --prepare-timeout "
            "(NXD_INFER_PREPARE_TIMEOUT), or trace it beforehand (`nxd-infer trace`) and serve the artifact"
        )
    how = child.explain()
    child.end()
    if child.returncode != 0 or not (out / MANIFEST_NAME).exists():
        raise SettingsError(
            f"the trace of {model} {how}, and wrote no artifact in {out}: its message is above; its options come from "
            f"--trace-options (NXD_INFER_TRACE_OPTIONS), now {settings.trace_options!r}"
        )
