"""Check that a checkpoint whose output head is tied to the embedding does not hold another head."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from nxd_infer.errors import WeightMismatchError
from nxd_infer.layout.sources import WeightSource

HEADS = ("lm_head.weight", "embed_out.weight")
EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight", "wte.weight")
"""Of decoders. T5's field says how the head's output is scaled, and its files whether the head is its own."""
PIECE = 1 << 22
"""Elements that are compared at a time."""


def check_tied_head(folder: Path, source: WeightSource) -> str | None:
    """Return the name of a tied head that the files hold in place of the embedding.

    Raises WeightMismatchError if ``config.json`` ties the head, and the files hold one unlike the embedding.

    Releases of transformers differ here: version 4 drops the head, version 5 uses it. Most tied checkpoints hold no
    head, and nothing is read.
    """
    names = sorted(source.keys())
    head, table = (next((n for n in names if n.endswith(ends)), None) for ends in (HEADS, EMBEDDINGS))
    if head is None or any(name.endswith("shared.weight") for name in names) or not _tied(folder / "config.json"):
        return None
    if table is None:
        return head
    if _equal(source, head, table):
        return None
    raise WeightMismatchError(
        f"{folder}: config.json says tie_word_embeddings = true, but the files hold {head!r} and {table!r} with "
        "different values; set it to false if the model has a head of its own, else remove that tensor"
    )


def _tied(config: Path) -> bool:
    """Return whether the file says so; what is wrong with it is told where it is read."""
    try:
        raw = json.loads(config.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(raw, dict) and raw.get("tie_word_embeddings") is True


def _equal(source: WeightSource, first: str, second: str) -> bool:
    shape = source.shape(first)
    if len(shape) != 2 or shape != source.shape(second):
        return False
    dtype = torch.promote_types(source.dtype(first), source.dtype(second))
    rows = max(1, PIECE // max(1, shape[1]))
    pieces = [(slice(start, min(start + rows, shape[0])), slice(0, shape[1])) for start in range(0, shape[0], rows)]
    return all(
        torch.equal(source.read(first, piece).to(dtype), source.read(second, piece).to(dtype)) for piece in pieces
    )
