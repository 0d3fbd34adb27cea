"""assert_parallel_equivalent in one process: what it takes for equal, and what it refuses before it starts ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxd_infer.errors import ParallelConfigError
from nxd_infer.testing import Training, assert_parallel_equivalent, compare_with, train_single
from tests.support.trainer.models import mlp, vectors


class Large(nn.Module):
    """Its gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2**21))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def test_the_norm_of_a_large_parameter():
    """Right training was told to be wrong: PyTorch's norm is wrong by 3e-5 here, and by less for each rank's part."""
    x = torch.randn(2**21)
    plain = train_single(Large, (x,), Training(steps=1))
    assert plain.norms == [pytest.approx(float(x.double().norm()), rel=5e-6)]


class Idle(nn.Module):
    """No loss and no gradient."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.weight * x[0, 0, :2] * 0).sum()


def test_a_model_that_learns_nothing():
    reference = train_single(Idle, vectors(), Training(steps=2))
    assert compare_with(reference, Idle, vectors(), Training(steps=2)) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pp": 2, "accumulate": 2}, "accumulate=2: a pipeline accumulates over its microbatches"),
        ({"dp": 3}, "the batch's 'x' has 4 rows, which do not divide into 3 equal parts"),
    ],
)
def test_what_does_not_fit(options: dict[str, Any], message: str):
    with pytest.raises(ParallelConfigError, match=message):
        assert_parallel_equivalent(mlp, vectors(), **options)


def test_functions_that_other_processes_cannot_import():
    with pytest.raises(ParallelConfigError, match=r"cannot import .*<lambda>.*: pass a function defined at the top"):
        assert_parallel_equivalent(lambda: mlp(), vectors())
