"""What a token classifier found in a text, by token or grouped, as transformers' token-classification pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from nxd_server.text.tokenizer import Tokenizer

STRATEGIES = ("none", "simple", "first", "average", "max")
"""Of aggregation: a result per token; adjacent tokens of one entity together; or whole words first, which have the
label of their first token, of the mean of their tokens' probabilities, or of their surest token."""
OUTSIDE = "O"
"""The label of what is no entity, which is left out."""


@dataclass(frozen=True)
class _Piece:
    """A token, or a word of several."""

    text: str
    start: int
    end: int
    index: int
    """Place of the token in the input."""
    continues: bool
    """It belongs to the word of the token before."""
    probabilities: np.ndarray
    """[labels]"""

    @property
    def label(self) -> int:
        return int(self.probabilities.argmax())

    @property
    def score(self) -> float:
        return float(self.probabilities.max())


def entities_in(
    text: str, logits: Any, labels: Sequence[str], tokenizer: Tokenizer, strategy: str
) -> list[dict[str, Any]]:
    """Return the entities of a text in order, with where they are in it, in characters.

    Args:
        text: what the tokenizer was given.
        logits: [tokens, labels], special tokens included.
        strategy: one of STRATEGIES.
    """
    pieces = list(_pieces(text, np.asarray(logits, dtype=np.float32), tokenizer))
    if strategy == "none":
        found = [(labels[piece.label], piece) for piece in pieces if labels[piece.label] != OUTSIDE]
        return [{"entity": label, "index": one.index, **_told(one.text, [one])} for label, one in found]
    decoder = tokenizer.raw.decoder
    join = " ".join if decoder is None else decoder.decode
    if strategy != "simple":
        pieces = [_word(group, strategy, join) for group in _split(pieces, lambda _, piece: not piece.continues)]

    def begins(before: _Piece, piece: _Piece) -> bool:
        return labels[piece.label].startswith("B-") or _kind(labels[before.label]) != _kind(labels[piece.label])

    groups = [(_kind(labels[group[0].label]), group) for group in _split(pieces, begins)]
    return [
        {"entity_group": kind, **_told(join([piece.text for piece in group]), group)}
        for kind, group in groups
        if kind != OUTSIDE
    ]


def _told(word: str, group: Sequence[_Piece]) -> dict[str, Any]:
    """Return what is said of an entity that consists of these pieces."""
    score = float(np.mean([piece.score for piece in group]))
    return {"score": score, "word": word, "start": group[0].start, "end": group[-1].end}


def _kind(label: str) -> str:
    """``B-PER`` and ``I-PER`` -> ``PER``."""
    return label[2:] if label[:2] in ("B-", "I-") else label


def _pieces(text: str, logits: np.ndarray, tokenizer: Tokenizer) -> Iterable[_Piece]:
    raw = tokenizer.raw
    encoding = raw.encode(text)
    unknown = getattr(raw.model, "unk_token", None)
    marks_words = bool(getattr(raw.model, "continuing_subword_prefix", None))
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities = powers / powers.sum(-1, keepdims=True)
    for index, (token, (start, end)) in enumerate(zip(encoding.tokens, encoding.offsets, strict=True)):
        if encoding.special_tokens_mask[index]:
            continue
        there = text[start:end]
        continues = len(token) != len(there) if marks_words else start > 0 and " " not in text[start - 1 : start + 1]
        if token == unknown:
            token, continues = there, False
        yield _Piece(token, start, end, index, continues, probabilities[index])


def _split(pieces: Iterable[_Piece], begins: Callable[[_Piece, _Piece], bool]) -> list[list[_Piece]]:
    """Return runs of pieces: a new one where ``begins(before, piece)``."""
    groups: list[list[_Piece]] = []
    for piece in pieces:
        if groups and not begins(groups[-1][-1], piece):
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


def _word(group: list[_Piece], strategy: str, join: Callable[[list[str]], str]) -> _Piece:
    if strategy == "first":
        found = group[0].probabilities
    elif strategy == "max":
        found = max(group, key=lambda piece: piece.score).probabilities
    else:
        found = np.mean([piece.probabilities for piece in group], axis=0)
    first = group[0]
    return _Piece(join([piece.text for piece in group]), first.start, group[-1].end, first.index, False, found)
