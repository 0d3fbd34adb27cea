"""Tokens of documents, one after the other."""

from __future__ import annotations

import numpy as np


class Documents:
    """What the files that hold documents have in common."""

    ids: np.ndarray
    """Integers [tokens]."""
    counts: np.ndarray | None
    """Whether each token's prediction counts in the loss; None: all do."""
    bounds: np.ndarray
    """int64: document i is ``ids[bounds[i]:bounds[i + 1]]``."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.bounds)
