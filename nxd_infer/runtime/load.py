"""Load an artifact to run it here: for this torch, machine and backend. Each error says what to do."""

from __future__ import annotations

import os
from pathlib import Path

from nxd_infer.artifact.manifest import Manifest
from nxd_infer.artifact.reader import LoadedArtifact, read_artifact
from nxd_infer.backends import registry
from nxd_infer.backends.base import check_encodings
from nxd_infer.errors import ArtifactBackendError, ArtifactCorruptError, ArtifactVersionError, NxdError
from nxd_infer.util.machine import torch_minor, torch_version


def load_artifact(
    path: str | os.PathLike[str],
    *,
    verify: bool = True,
    expect_digest: str | None = None,
    backend: str | None = None,
    temporary: bool = False,
    runs_here: bool = True,
    later: bool = False,
) -> LoadedArtifact:
    """Check the artifact at ``path``, and that it can run here, and return its manifest.

    ``verify``, ``expect_digest`` and ``temporary``: see :func:`~nxd_infer.artifact.reader.read_artifact`. Rejects an
    artifact of a backend other than ``backend``, if given. ``runs_here=False`` accepts code that this machine cannot
    run. ``later`` leaves slow checks to the code that starts the ranks: ``verify()``, and the backend's, which each
    rank makes.

    Raises ArtifactError if ``path`` is not an artifact, ArtifactVersionError for another format, torch or CPU,
    ArtifactBackendError for another backend, ArtifactCorruptError naming the file for any damage.
    """

    def check(root: Path, manifest: Manifest) -> None:
        recorded, installed = manifest.versions.get("torch", ""), torch_version()
        if torch_minor(recorded) != torch_minor(installed):
            raise ArtifactVersionError(
                f"the artifact {root} was compiled with torch {recorded or 'of an unknown version'} and this is torch "
                f"{installed}: compiled graphs need the same major.minor; install torch {torch_minor(recorded)} or "
                "trace again"
            )
        if runs_here:
            _check_backend(root, manifest, backend, probe=not later)

    return read_artifact(
        path, verify=verify, expect_digest=expect_digest, temporary=temporary, later=later, check=check
    )


def _check_backend(root: Path, manifest: Manifest, backend: str | None, probe: bool) -> None:
    """Raise ArtifactBackendError for another backend than ``backend``, or one that cannot run here (checked if
    ``probe``), and ArtifactVersionError for a machine that lacks what the graphs need."""
    if backend is not None and registry.canonical(backend) != registry.canonical(manifest.backend):
        raise ArtifactBackendError(
            f"the artifact {root} was traced for the backend {manifest.backend!r}, not {backend!r}: "
            f"load it without a backend, or trace again with backend={backend!r}"
        )
    try:
        own = registry.get(manifest.backend)
        answer = own.probe() if probe else None
    except (NxdError, ImportError) as error:
        raise ArtifactBackendError(
            f"the artifact {root} needs the backend {manifest.backend!r}, which is not installed here: {error}"
        ) from error
    if answer is not None and not answer.ok:
        raise ArtifactBackendError(
            f"the artifact {root} needs the backend {manifest.backend!r}, which cannot run here: {answer.reason}"
        )
    check_encodings(root, manifest, own)
    try:
        own.check_target(manifest.target, manifest.versions)
    except (ArtifactVersionError, ArtifactCorruptError) as error:
        raise type(error)(f"the artifact {root} {error}") from error
