"""The meaning of a classifier's logits, as declared by its artifact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nxd_infer.errors import ArtifactVersionError

SCORES = ("sigmoid", "softmax", "none")


def scores_of(metadata: Mapping[str, Any]) -> str:
    """Return ``sigmoid`` (independent labels), ``softmax`` (exclusive labels) or ``none`` (the logits are the scores).

    Raises ArtifactVersionError for an unknown value.
    """
    if "scores" in metadata:
        scores = metadata["scores"]
        if scores not in SCORES:
            raise ArtifactVersionError(
                f"the artifact's scores = {scores!r}: this version knows {SCORES[0]}, {SCORES[1]} and {SCORES[2]}; "
                "trace the model again with it, or serve it with the version that traced it"
            )
        return scores
    if metadata.get("regression"):  # an old artifact without the key ``scores``
        return "none"
    return "sigmoid" if len(metadata.get("labels") or ()) == 1 else "softmax"


def probabilities(logits: torch.Tensor, scores: str) -> torch.Tensor | None:
    """Return the probabilities of ``logits`` [..., labels] according to ``scores``; None if that is ``none``."""
    if scores == "none":
        return None
    return logits.sigmoid() if scores == "sigmoid" else logits.softmax(-1)


def likeliest(logits: torch.Tensor, labels: Sequence[str]) -> str:
    """Return the label of the largest of ``logits`` [labels]; its index if it has no name."""
    best = int(logits.argmax())
    return labels[best] if best < len(labels) else str(best)
