"""What a classifier's logits mean, as its artifact says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def scores_of(metadata: Mapping[str, Any]) -> str:
    """``sigmoid`` (each label for itself), ``softmax`` (one of them) or ``none`` (the logits are the scores)."""
    if "scores" in metadata:
        return str(metadata["scores"])
    if metadata.get("regression"):  # an artifact from before it was written down
        return "none"
    return "sigmoid" if len(metadata.get("labels") or ()) == 1 else "softmax"


def probabilities(logits: torch.Tensor, scores: str) -> torch.Tensor | None:
    """Of ``logits`` [..., labels], as ``scores`` says; None where it is ``none``."""
    if scores == "none":
        return None
    return logits.sigmoid() if scores == "sigmoid" else logits.softmax(-1)
