"""Read an artifact: verify it, or reject it by name.

Reading needs neither the model's code nor a compiler, and nothing is unpickled. Native code is run, however, so
checksums detect damage, not malice: load artifacts you trust, or pin one with ``expect_digest``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import from_json

from nxd_infer.artifact.manifest import (
    BUCKET_KERNEL_NAME,
    BUCKET_KERNEL_REQUIREMENT,
    FORMAT,
    KNOWN_REQUIREMENTS,
    MANIFEST_NAME,
    PACKED_FILES_REQUIREMENT,
    PIPELINE_REQUIREMENT,
    BucketSpec,
    Manifest,
    weight_name,
)
from nxd_infer.artifact.structure import names_in
from nxd_infer.artifact.verified import Stamp, recalled, remember, unchanged, verify_files
from nxd_infer.artifact.writer import CHECKSUM_KEY, check_weight_file, checked_name, manifest_checksum
from nxd_infer.errors import ArtifactCorruptError, ArtifactError, ArtifactVersionError
from nxd_infer.util.reading import parse_json

__all__ = [
    "LoadedArtifact", "artifact_digest", "read_artifact",
]  # fmt: skip

log = logging.getLogger(__name__)

_MANIFEST_LIMIT = 256 << 20
_GIVE = "give the directory that parallel_model_save or `nxd-infer trace --out` wrote"


@dataclass(frozen=True)
class LoadedArtifact:
    """A verified artifact on disk. Only its manifest has been read into memory."""

    manifest: Manifest
    path: Path
    digest: str
    """sha256 of ``manifest.json``, which holds a checksum of every other file, so it identifies the whole artifact."""
    temporary: bool = False
    """Whether this process owns the directory and removes it at the end (a traced model that was not saved)."""
    stamps: dict[str, Stamp] = field(default_factory=dict, repr=False, compare=False)
    """Stamps of all verified files, by which :meth:`verify_again` recognises them."""
    _owner: list[weakref.finalize] = field(default_factory=list, repr=False, compare=False)
    _ignored: set[str] = field(default_factory=set, repr=False, compare=False)

    def find(self, name: str) -> Path | None:
        """Return a file of the artifact; None if the manifest does not list it, so the digest does not cover it.

        If such a file exists anyway, a warning says once that it is ignored.
        """
        if name in self.manifest.files:
            return self.path / name
        if name not in self._ignored and os.path.lexists(self.path / name):
            self._ignored.add(name)
            log.warning("%s is ignored: the artifact's manifest does not list it", self.path / name)
        return None

    def find_in(self, folder: str) -> list[Path]:
        """Return the files directly in a folder, like :meth:`find`."""
        there = (
            {f"{folder}/{name}" for name in os.listdir(self.path / folder)} if (self.path / folder).is_dir() else set()
        )
        listed = {name for name in self.manifest.files if name.rpartition("/")[0] == folder}
        return [path for name in sorted(there | listed) if (path := self.find(name)) is not None]

    def file(self, name: str) -> Path:
        """Like :meth:`find`, for a file that must exist. Raises ArtifactCorruptError."""
        path = self.find(name)
        if path is None:
            raise ArtifactCorruptError(f"the manifest of {self.path} does not list the file {name}, which is needed")
        return path

    def graph_dir(self, digest: str) -> Path:
        """Return the folder of a graph. Raises ArtifactCorruptError if it holds an unlisted file, because loaders take
        a whole folder and recognise code by its suffix."""
        folder = self.path / "graphs" / digest
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(self.path).as_posix()
            if name not in self.manifest.files and (path.is_symlink() or not path.is_dir()):
                raise ArtifactCorruptError(
                    f"{path} is not listed in the artifact's manifest, and might be run as code: remove that file"
                )
        return folder

    def weight_file(self, rank: int) -> Path:
        return self.file(weight_name(rank))

    @property
    def _weights(self) -> set[str]:
        return {weight_name(rank) for rank in range(self.manifest.world_size)}

    @property
    def weight_bytes(self) -> int:
        """Size of the weight files of all ranks; missing ones are reported when they are read."""
        files = [self.weight_file(rank) for rank in range(self.manifest.world_size)]
        return sum(file.stat().st_size for file in files if file.exists())

    def op_file(self, digest: str) -> Path:
        return self.file(f"ops/{digest}.so")

    @property
    def bucket_kernel_file(self) -> Path | None:
        """The user's bucket kernel, or None if the package does the routing."""
        return self.file(BUCKET_KERNEL_NAME) if BUCKET_KERNEL_REQUIREMENT in self.manifest.requires else None

    def check_kernel(self, allowed: bool) -> None:
        """Raise ArtifactError if there is a bucket kernel and it is not ``allowed``."""
        if self.bucket_kernel_file is not None and not allowed:
            why = "which is code, and allow_kernel=False (--no-kernel): allow it if you trust whoever made it"
            raise ArtifactError(f"{self.path} routes with {BUCKET_KERNEL_NAME}, {why}")

    def verify(self, *, again: bool = True) -> None:
        """Hash every file; with ``again=False`` no weights that are as another process has verified them since the
        machine started. Raises ArtifactCorruptError naming one that differs from its record."""
        files, begin = self.manifest.files, time.time_ns()
        known = {} if again else recalled(self.path, {name: files[name] for name in files if name in self._weights})
        self.stamps.update(verify_files(self.path, files, files.keys() - known.keys()))
        self.stamps.update(known)
        if not again and self._weights - known.keys():
            remember(self.path, files, {name: self.stamps[name] for name in self._weights}, begin)

    def verify_again(self, rank: int) -> None:
        """Before rank ``rank`` reads anything, hash the files that it will read and that may have changed since they
        were verified. Does nothing if they never were.

        Raises ArtifactCorruptError like :meth:`verify`, and if another artifact has replaced this one.
        """
        if artifact_digest(self.path) != self.digest:
            raise ArtifactCorruptError(f"the artifact {self.path} was replaced after it was loaded; load it again")
        code = ("graphs/", "ops/", BUCKET_KERNEL_NAME)
        own = {name: stamp for name, stamp in self.stamps.items() if name.startswith(code) or name == weight_name(rank)}
        changed = [name for name, stamp in own.items() if not unchanged(self.path / name, stamp)]
        self.stamps.update(verify_files(self.path, self.manifest.files, changed))

    def discard(self) -> None:
        """Remove a temporary artifact's directory; no effect on others."""
        for finalizer in self._owner:
            finalizer()


def artifact_digest(path: str | os.PathLike[str]) -> str:
    """Return the digest for ``expect_digest``: the sha256 of ``manifest.json``."""
    return hashlib.sha256(_read_manifest(Path(path))).hexdigest()


def read_artifact(
    path: str | os.PathLike[str],
    *,
    verify: bool = True,
    expect_digest: str | None = None,
    temporary: bool = False,
    later: bool = False,
    check: Callable[[Path, Manifest], None] | None = None,
) -> LoadedArtifact:
    """Check the artifact at ``path`` and return its manifest.

    ``verify`` hashes every file (in parallel threads); sizes are always checked. ``expect_digest`` pins the
    artifact (see :func:`artifact_digest`; a ``sha256:`` prefix is allowed) and implies ``verify``. Unlisted files are
    ignored. ``temporary`` transfers ownership: the directory is removed with the returned object. ``later`` leaves
    hashing to the code that starts the ranks: ``verify()``. ``check`` is called with the directory and the manifest
    once its format is known and before its contents are trusted: it may reject an artifact of another version.

    Raises ArtifactError if ``path`` is not an artifact, ArtifactVersionError for another format, ArtifactCorruptError
    naming the file for any damage.
    """
    root = Path(os.path.abspath(path))
    data = _read_manifest(root)
    digest = hashlib.sha256(data).hexdigest()
    if expect_digest is not None and expect_digest.removeprefix("sha256:").lower() != digest:
        raise ArtifactCorruptError(
            f"the artifact {root} has digest {digest}, expected {expect_digest}: it is another one"
        )
    manifest = _parse(root, data, check)
    _check_files(root, manifest)
    artifact = LoadedArtifact(manifest, root, digest, temporary)
    if (verify or expect_digest is not None) and not later:
        artifact.verify()
    for rank in range(manifest.world_size):
        check_weight_file(root / weight_name(rank), manifest.of_rank(rank))
    if temporary:
        artifact._owner.append(weakref.finalize(manifest, _remove, root, os.getpid()))
    return artifact


def _remove(root: Path, owner: int) -> None:
    """Remove a temporary artifact, but only in the process that made it, not in a forked child that exits."""
    if os.getpid() == owner:
        shutil.rmtree(root, ignore_errors=True)


def _read_manifest(root: Path) -> bytes:
    if not root.is_dir():
        raise ArtifactError(f"{root} is not an artifact: there is no such directory; {_GIVE}")
    path = root / MANIFEST_NAME
    try:
        info = os.stat(path)
    except FileNotFoundError:
        if (root / "config.json").is_file():
            raise ArtifactError(
                f"{root} is not an artifact but a model to trace: "
                f"`nxd-infer trace {root} --out artifact` makes one of it"
            ) from None
        raise ArtifactError(
            f"{root} is not an artifact: it has no {MANIFEST_NAME}, which is written last; {_GIVE}"
        ) from None
    if not stat.S_ISREG(info.st_mode):
        raise ArtifactCorruptError(f"{path} is not a regular file; refusing it")
    if info.st_size > _MANIFEST_LIMIT:
        raise ArtifactCorruptError(
            f"{path} has {info.st_size} bytes, more than the {_MANIFEST_LIMIT} a manifest may have"
        )
    return path.read_bytes()


def _parse(root: Path, data: bytes, check: Callable[[Path, Manifest], None] | None) -> Manifest:
    """Parse the manifest completely or reject it: the format first, because everything else depends on it."""
    path = root / MANIFEST_NAME
    try:
        from_json(data, allow_inf_nan=False)  # also refuses half a character, and very deep nesting
        fields = parse_json(data)
    except ValueError as error:
        raise ArtifactCorruptError(f"{path} is damaged: it is not JSON ({error})") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("format"), str):
        raise ArtifactCorruptError(f"{path} is damaged: it has no format")
    version, known = fields["format"], FORMAT
    if version.split(".")[0] != known.split(".")[0]:
        raise ArtifactVersionError(
            f"the artifact {root} has format {version}; this package reads {known.split('.')[0]}.x: "
            "trace again with this version, or load it with the one that wrote it"
        )
    try:
        manifest = Manifest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise ArtifactCorruptError(f"{path} is damaged: {where}: {first['msg']}") from error
    unknown = sorted(set(manifest.requires) - KNOWN_REQUIREMENTS)
    if unknown:
        raise ArtifactVersionError(
            f"the artifact {root} requires {', '.join(unknown)}, which this version of nxd_infer does not know: "
            "upgrade it"
        )
    if check is not None:
        check(root, manifest)
    if fields.get(CHECKSUM_KEY) != manifest_checksum(fields):
        raise ArtifactCorruptError(f"{path} is damaged: its contents differ from its own checksum")
    _check_structure(path, manifest)
    return manifest


def _check_structure(path: Path, manifest: Manifest) -> None:
    """Check what the rest of the package relies on: every reference resolves, every needed file is listed."""
    problems: list[str] = []
    if manifest.pp_degree > 1 and PIPELINE_REQUIREMENT not in manifest.requires:
        problems.append(f"pp degree {manifest.pp_degree} without requiring {PIPELINE_REQUIREMENT!r}")
    if manifest.packed and PACKED_FILES_REQUIREMENT not in manifest.requires:
        problems.append(f"packed weights without requiring {PACKED_FILES_REQUIREMENT!r}")
    encoded = {weight.name for weight in manifest.weights if weight.encoding}
    problems += [f"packed weight {spec.name!r} has no encoding" for spec in manifest.packed if spec.name not in encoded]
    names = [bucket.name for bucket in manifest.buckets]
    problems += [f"bucket {name!r} twice" for name in sorted({name for name in names if names.count(name) > 1})]
    states = {state.name for state in manifest.states}
    weights = {weight.name for weight in manifest.weights}
    for bucket in manifest.buckets:
        if len(bucket.graphs) != manifest.world_size:
            problems.append(f"bucket {bucket.name!r} has {len(bucket.graphs)} graphs for {manifest.world_size} ranks")
        problems += _stage_problems(bucket, manifest.pp_degree)
        problems += [f"graph {g} of bucket {bucket.name!r}" for g in bucket.graphs if g not in manifest.graphs]
        try:
            named = set() if bucket.structure is None else set(names_in(bucket.structure))
        except ValueError as error:
            problems.append(f"structure of bucket {bucket.name!r}: {error}")
            continue
        strange = sorted(named - {output.name for output in bucket.outputs})
        problems += [f"output {name!r} of bucket {bucket.name!r}" for name in strange]
    for key, graph in manifest.graphs.items():
        problems += [f"state {name!r} of graph {key}" for name in graph.states if name not in states]
        problems += [f"weight {name!r} of graph {key}" for name in graph.weights if name not in weights]
        if not any(name.startswith(f"graphs/{key}/") for name in manifest.files):
            problems.append(f"no file of graph {key}")
    ranks = range(0 if problems else manifest.world_size)  # the degree may be trusted only without problems
    needed = [weight_name(rank) for rank in ranks] + [f"ops/{op}.so" for op in manifest.ops]
    if BUCKET_KERNEL_REQUIREMENT in manifest.requires:
        needed.append(BUCKET_KERNEL_NAME)
    problems += [f"file {name} is not listed" for name in needed if name not in manifest.files]
    if problems:
        raise ArtifactCorruptError(f"{path} does not hold together: {'; '.join(problems[:5])}")


def _stage_problems(bucket: BucketSpec, stages: int) -> list[str]:
    """Return what keeps the stages of a bucket from handing one another what they need."""
    if len(bucket.stages) != (stages if stages > 1 else 0):
        return [f"bucket {bucket.name!r} has {len(bucket.stages)} stages for a pipeline of {stages}"]
    outputs = [spec.name for spec in bucket.outputs]
    handed = [spec.name for spec in bucket.handed]
    known: list[str] = []
    problems = []
    for number, stage in enumerate(bucket.stages):
        unmade = [name for name in stage.takes if name not in known or name not in handed]
        problems += [f"stage {number} of bucket {bucket.name!r} takes {name!r}" for name in unmade]
        known += stage.gives
    if bucket.stages and sorted(known) != sorted([*outputs, *handed]):
        problems.append(f"the stages of bucket {bucket.name!r} do not give each output and handed value once")
    return problems


def _check_files(root: Path, manifest: Manifest) -> None:
    """Check that every listed file is a regular one with its recorded size."""
    for name, spec in manifest.files.items():
        path = root / checked_name(name)
        try:
            info = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            raise ArtifactCorruptError(f"the artifact {root} lacks its file {name}") from None
        if not stat.S_ISREG(info.st_mode):
            raise ArtifactCorruptError(f"{path} is not a regular file; an artifact holds plain files only")
        if info.st_size != spec.size:
            short = "truncated" if info.st_size < spec.size else "altered"
            raise ArtifactCorruptError(f"{name} of {root} is {short}: {info.st_size} bytes, recorded {spec.size}")
