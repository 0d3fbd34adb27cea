"""Where to find a model's text files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nxd_infer.artifact.reader import LoadedArtifact

    Source = str | os.PathLike[str] | LoadedArtifact
    """A model directory, or an artifact."""


class TextFiles:
    """The text files of a model: all in its directory, or for an artifact only those that its manifest lists."""

    def __init__(self, source: Source):
        self.artifact = None if isinstance(source, str | os.PathLike) else source
        self.directory = Path(source) if isinstance(source, str | os.PathLike) else source.path

    def find(self, name: str) -> Path | None:
        """Return the file's path, or None if it does not exist."""
        if self.artifact is not None:
            return self.artifact.find(name)
        return path if (path := self.directory / name).is_file() else None

    def find_in(self, folder: str, suffix: str) -> list[Path]:
        """Return the files of a folder whose names end in ``suffix``, sorted by name."""
        if self.artifact is not None:
            return [path for path in self.artifact.find_in(folder) if path.name.endswith(suffix)]
        return sorted(self.directory.glob(f"{folder}/*{suffix}"))
