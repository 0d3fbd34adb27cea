"""assert_parallel_equivalent, the product: it passes for what is equal, and says what is not."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.parallel_layers import ColumnParallelLinear, RowParallelLinear
from nxd_infer.testing import Training, assert_parallel_equivalent, compare_with, train_single
from tests.support.ranks import run_ranks
from tests.support.trainer.models import llama, mlp, tokens, vectors


def test_it_passes_over_processes_of_its_own():
    assert_parallel_equivalent(llama, tokens(), tp=2, dp=1, sequence_parallel=True, activation_checkpoint="full")


class Wrong(nn.Module):
    """Forgets the sum over the ranks: right in one process only."""

    def __init__(self, fault: str = ""):
        super().__init__()
        self.up = ColumnParallelLinear(16, 32, gather_output=False, bias=False)
        self.down = RowParallelLinear(32, 16, bias=False, input_is_parallel=True, reduce_output=fault != "unreduced")
        self.scale = nn.Parameter(torch.ones(16))
        self.fault = fault

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        tp = current_context().tp
        if self.fault == "raises" and tp.rank == 1:
            raise ValueError("this rank gives up")
        if self.fault == "dies" and tp.rank == 1:
            os._exit(7)
        if self.fault == "hangs" and tp.degree > 1:
            time.sleep(600)
        if self.fault == "scaled" and tp.degree > 1:  # the same value, another gradient
            return ((self.down(self.up(x)) * (2 * self.scale - self.scale.detach()) - y) ** 2).mean()
        return ((self.down(self.up(x)) * self.scale - y) ** 2).mean()


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


def test_it_names_what_differs():
    with pytest.raises(AssertionError) as raised:
        assert_parallel_equivalent(partial(Wrong, "scaled"), vectors(), tp=2, steps=1)
    text = str(raised.value)
    assert "parallel training (tp=2, pp=1, dp=1) is not plain PyTorch" in text
    first = text.splitlines()[1]
    assert first.startswith("rank 0: ") and "the gradient of scale differs by 1, allowed 1e-05" in text
    assert "the gradient of up.weight" not in text and "the loss" not in text


def faults() -> dict[str, list[str]]:
    reference = train_single(Wrong, vectors(), Training(tp=2, steps=2))
    return {
        fault: compare_with(reference, partial(Wrong, fault), vectors(), Training(tp=2, steps=2))
        for fault in ("", "unreduced")
    }


def test_a_forgotten_sum():
    for found in run_ranks(faults, 2):
        assert found[""] == []
        assert any("the loss of step 0" in line for line in found["unreduced"])
        assert any("the gradient of down.weight" in line for line in found["unreduced"])


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
    ("fault", "timeout", "message"),
    [
        ("raises", 600, r"rank 1 of 2 failed:\n[\s\S]*ValueError: this rank gives up"),
        ("dies", 600, r"rank 1 of 2 ended with status 7"),
        ("hangs", 8, r"ranks \[0, 1\] of 2 had not ended after 8 s and were killed"),
    ],
)
def test_ranks_that_fail(fault: str, timeout: float, message: str):
    with pytest.raises(RuntimeError, match=message):
        assert_parallel_equivalent(partial(Wrong, fault), vectors(), tp=2, steps=1, timeout=timeout)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pp": 2, "accumulate": 2}, "accumulate=2: a pipeline accumulates over its microbatches"),
        ({"dp": 3}, "the batch's 'x' has 4 rows, which do not divide into 3 equal parts"),
        ({"dp": 2, "accumulate": 4}, "which do not divide into 8 equal parts"),
    ],
)
def test_what_does_not_fit(options: dict[str, Any], message: str):
    with pytest.raises(ParallelConfigError, match=message):
        assert_parallel_equivalent(mlp, vectors(), **options)


def test_functions_that_other_processes_cannot_import():
    with pytest.raises(ParallelConfigError, match=r"cannot import .*<lambda>.*: pass a function defined at the top"):
        assert_parallel_equivalent(lambda: mlp(), vectors())
