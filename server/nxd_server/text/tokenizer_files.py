"""Which files make up a tokenizer, and where to find a model's text files; imports no other package of the server."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nxd_infer.artifact.reader import LoadedArtifact

    Source = str | os.PathLike[str] | LoadedArtifact
    """A model directory, or an artifact."""

TOKENIZERS = (("tokenizer.json",), ("vocab.txt",), ("vocab.json", "merges.txt"))
"""Files that ``Tokenizer.from_dir`` tries in this order: the ``tokenizers`` library's own, BERT's, GPT-2's."""


def has_tokenizer(names: Collection[str]) -> bool:
    """Whether ``names`` include all files of one kind of tokenizer."""
    return any(all(name in names for name in kind) for kind in TOKENIZERS)


class TextFiles:
    """The text files of a model: all in its directory, or for an artifact only those that its manifest lists."""

    def __init__(self, source: Source):
        self._artifact = None if isinstance(source, str | os.PathLike) else source
        self.directory = Path(source) if isinstance(source, str | os.PathLike) else source.path

    def find(self, name: str) -> Path | None:
        """Return the file's path, or None if it does not exist."""
        if self._artifact is not None:
            return self._artifact.find(name)
        return path if (path := self.directory / name).is_file() else None

    def find_in(self, folder: str, suffix: str) -> list[Path]:
        """Return the files of a folder whose names end in ``suffix``, sorted by name."""
        if self._artifact is not None:
            return [path for path in self._artifact.find_in(folder) if path.name.endswith(suffix)]
        return sorted(self.directory.glob(f"{folder}/*{suffix}"))

    def has_vocabulary(self) -> bool:
        """Whether the first file of any kind exists; if others of that kind are missing, that is an error."""
        return any(self.find(kind[0]) is not None for kind in TOKENIZERS)
