"""A toy model that guesses for another one: always right, never, or in part."""

from __future__ import annotations

import numpy as np

from tests.support.engine.toy_model import ToyModel, logits_of


class ToyDraft(ToyModel):
    """Its logits are the target's, as far as a ``distance`` of 0 to 1 lets them be; "never": no best token is."""

    def __init__(self, distance=0.0, **options):
        super().__init__(**options)
        self.distance = distance
        self.costs = dict.fromkeys(self.costs, 1e-6)

    def logits(self, prefix):
        raw = logits_of(prefix, self.weights)
        if self.distance == "never":
            return np.roll(raw, 1)
        return (1 - self.distance) * raw + self.distance * logits_of(prefix, 12345)


def target(**options):
    """A toy that verifies guesses, at the cost of a step without."""
    model = ToyModel(speculate=3, **options)
    model.costs |= {name: 1e-3 for name in model.costs if name.startswith(("decode", "verify"))}
    return model
