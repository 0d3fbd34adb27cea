"""Which files make a tokenizer, and where a model's files of text are found; imports none of the server's packages."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nxd_infer.artifact.reader import LoadedArtifact

    Source = str | os.PathLike[str] | LoadedArtifact
    """A model's directory, or an artifact."""

TOKENIZERS = (("tokenizer.json",), ("vocab.txt",), ("vocab.json", "merges.txt"))
"""What ``Tokenizer.from_dir`` reads, the first that is there: the ``tokenizers`` library's own, BERT's, GPT-2's."""


def has_tokenizer(names: Collection[str]) -> bool:
    """Whether the files of a directory include all that one kind of tokenizer needs."""
    return any(all(name in names for name in kind) for kind in TOKENIZERS)


class TextFiles:
    """The files of a model: what lies in its directory, or of an artifact only what its manifest lists."""

    def __init__(self, source: Source):
        self._artifact = None if isinstance(source, str | os.PathLike) else source
        self.directory = Path(source) if isinstance(source, str | os.PathLike) else source.path

    def find(self, name: str) -> Path | None:
        """The file, where there is one."""
        if self._artifact is not None:
            return self._artifact.find(name)
        return path if (path := self.directory / name).is_file() else None

    def find_in(self, folder: str, suffix: str) -> list[Path]:
        """The files of a folder whose names end so, by name."""
        if self._artifact is not None:
            return [path for path in self._artifact.find_in(folder) if path.name.endswith(suffix)]
        return sorted(self.directory.glob(f"{folder}/*{suffix}"))

    def has_vocabulary(self) -> bool:
        """Whether they include any kind's first: the others may be missing, which is an error."""
        return any(self.find(kind[0]) is not None for kind in TOKENIZERS)
