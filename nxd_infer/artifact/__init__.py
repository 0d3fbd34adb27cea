"""The artifact on disk: manifest, reader, writer, rank weights. Knows no backend and starts no process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_infer.util.lazy import lazy_names

__all__ = ["ArtifactWriter", "LoadedArtifact", "Manifest", "artifact_digest", "read_artifact"]

if TYPE_CHECKING:
    from nxd_infer.artifact.manifest import Manifest
    from nxd_infer.artifact.reader import LoadedArtifact, artifact_digest, read_artifact
    from nxd_infer.artifact.writer import ArtifactWriter

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".manifest": "Manifest",
        ".reader": "LoadedArtifact artifact_digest read_artifact",
        ".writer": "ArtifactWriter",
    },
)
