"""What verify accepts as equal."""

from __future__ import annotations

import math

import pytest
import torch

from nxd_infer.verify.artifact import compare, relative


@pytest.mark.parametrize(
    ("ours", "reference", "difference"),
    [
        ([1.0, -math.inf], [1.0, -math.inf], 0.0),
        ([1.0, math.nan], [1.0, math.nan], 0.0),
        ([1.0, 2.0], [1.0, math.inf], math.inf),
        ([1.0, math.nan], [1.0, -math.inf], math.inf),
        ([1.0, math.inf], [1.0, -math.inf], math.inf),
        ([1.0, 3.0], [1.0, 4.0], 0.25),
    ],
)
def test_values_that_are_not_finite_must_be_the_same(ours, reference, difference):
    a, b = torch.tensor(ours), torch.tensor(reference)
    assert relative(a, b) == difference
    assert bool(compare("bucket", {"y": a}, {"y": b}, 0.1).wrong) == (difference > 0.1)
