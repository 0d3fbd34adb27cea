"""assert_parallel_equivalent, the product: it passes for what is equal, and says what is not."""

from __future__ import annotations

import os
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.parallel_layers import ColumnParallelLinear, RowParallelLinear
from nxd_infer.testing import assert_parallel_equivalent
from tests.support.trainer.models import llama, tokens, vectors


def test_it_passes_over_processes_of_its_own():
    assert_parallel_equivalent(llama, tokens(), tp=2, dp=1, sequence_parallel=True, activation_checkpoint="full")


class Wrong(nn.Module):
    """Right in one process only."""

    def __init__(self, fault: str = ""):
        super().__init__()
        self.up = ColumnParallelLinear(16, 32, gather_output=False, bias=False)
        self.down = RowParallelLinear(32, 16, bias=False, input_is_parallel=True)
        self.scale = nn.Parameter(torch.ones(16))
        self.fault = fault

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        tp = current_context().tp
        if self.fault == "raises" and tp.rank == 1:
            raise ValueError("this rank gives up")
        if self.fault == "dies" and dist.is_initialized():
            os._exit(7)
        if self.fault == "hangs" and dist.is_initialized():
            time.sleep(600)
        if self.fault == "scaled" and tp.degree > 1:  # the same value, another gradient
            return ((self.down(self.up(x)) * (2 * self.scale - self.scale.detach()) - y) ** 2).mean()
        return ((self.down(self.up(x)) * self.scale - y) ** 2).mean()


def test_it_names_what_differs():
    with pytest.raises(AssertionError) as raised:
        assert_parallel_equivalent(partial(Wrong, "scaled"), vectors(), tp=2, steps=1)
    text = str(raised.value)
    assert "parallel training (tp=2, pp=1, dp=1) is not plain PyTorch" in text
    first = text.splitlines()[1]
    assert first.startswith("rank 0: ") and "the gradient of scale differs by 1, allowed 1e-05" in text
    assert "the gradient of up.weight" not in text and "the loss" not in text


@pytest.mark.parametrize(
    ("fault", "tp", "timeout", "message"),
    [
        ("raises", 2, 600, r"rank 1 of 2 failed:\n[\s\S]*ValueError: this rank gives up"),
        ("dies", 1, 600, r"of 1 ranks, rank 0 ended with status 7"),
        ("hangs", 1, 0.5, r"the ranks have not ended after 0.5 s"),
    ],
)
def test_ranks_that_fail(fault: str, tp: int, timeout: float, message: str):
    """What the first says that failed by itself; the others lose it as a peer."""
    with pytest.raises(RuntimeError, match=message):
        assert_parallel_equivalent(partial(Wrong, fault), vectors(), tp=tp, steps=1, timeout=timeout)
