"""Which stage a checkpoint's weights belong to, by their names alone."""

from __future__ import annotations

import pytest

from nxd_infer.checkpoint.stages_by_name import stages_of
from nxd_infer.errors import ParallelConfigError

WEIGHTS = {
    "embed.weight": 100,
    "layers.0.a": 8,
    "layers.2.a": 8,
    "head.weight": 12,
    "layers.1.a": 8,
    "layers.1.norm": 0,
    "layers.10.a": 8,
}


def test_stages_by_name():
    assert stages_of(WEIGHTS, 2) == {
        "embed.weight": 0,
        "layers.0.a": 0,
        "layers.1.a": 0,
        "layers.1.norm": 0,
        "layers.2.a": 0,
        "layers.10.a": 1,
        "head.weight": 1,
    }
    assert stages_of(WEIGHTS, 3, ["layers.0", "layers.1"])["layers.10.a"] == 2
    assert set(stages_of(WEIGHTS, 1).values()) == {0}
    wrong = {
        "need 1 cuts, got 2": (2, ["layers.0", "layers.1"]),
        "has no layer 'layers.3'; did you mean": (2, ["layers.3"]),
        "are not in the order of the layers": (3, ["layers.1", "layers.0"]),
        "at most 5 stages": (6, None),
    }
    for message, (stages, cuts) in wrong.items():
        with pytest.raises(ParallelConfigError, match=message):
            stages_of(WEIGHTS, stages, cuts)
