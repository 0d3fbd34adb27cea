"""Which files make a tokenizer; imports nothing, so that commands without the server's packages can ask."""

from __future__ import annotations

from collections.abc import Collection

TOKENIZERS = (("tokenizer.json",), ("vocab.txt",), ("vocab.json", "merges.txt"))
"""What ``Tokenizer.from_dir`` reads, the first that is there: the ``tokenizers`` library's own, BERT's, GPT-2's."""


def has_tokenizer(names: Collection[str]) -> bool:
    """Whether the files of a directory include all that one kind of tokenizer needs."""
    return any(all(name in names for name in kind) for kind in TOKENIZERS)


def has_vocabulary(names: Collection[str]) -> bool:
    """Whether the files of a directory include any kind's first: the others may be missing, which is an error."""
    return any(kind[0] in names for kind in TOKENIZERS)
