"""Gradients of sequence-parallel parameters are summed over the ranks once, whatever a loop does with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nxd_infer.context import current_context
from nxd_infer.optimizer import NxDOptimizer
from nxd_infer.parallel_layers.layer_norm import LayerNorm
from tests.support.ranks import run_ranks

OPTIONS: list[dict[str, Any]] = [{}, {"zero1": True}, {"master_weights": torch.float64, "fp32_grad_acc": True}]


def loss(norm: LayerNorm, rows: slice, seed: int) -> Tensor:
    x, weights = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(seed))
    return (norm(x[rows]) * weights[rows]).sum()


def loops(options: dict[str, Any]) -> list[list[Tensor]]:
    """What each loop makes of the parameters, over the ranks and with the whole sequence here."""
    here, found = current_context().tp.rank, []
    for rows, given in ((slice(here, here + 1), options), (slice(0, 2), {})):
        norm = LayerNorm(4, sequence_parallel_enabled=rows != slice(0, 2))
        optimizer = NxDOptimizer(norm.parameters(), torch.optim.SGD, grad_clipping=False, defaults={"lr": 0.1}, **given)
        for zeroing in (True, False, None):
            for seed in range(3):
                loss(norm, rows, seed).backward()
                optimizer.synchronize_gradients()  # to look at the gradients, between two of a step's passes
                if zeroing is None and seed == 1:
                    for param in norm.parameters():  # zeroed by hand
                        if param.grad is not None:
                            param.grad.zero_()
                        if getattr(param, "main_grad", None) is not None:
                            param.main_grad.zero_()
            optimizer.step()
            if zeroing is not None:
                optimizer.zero_grad(set_to_none=zeroing)
        found.append([param.detach().clone() for param in norm.parameters()])
        if not given:  # clipped by hand: what replaces a gradient is final as well
            optimizer.zero_grad()
            loss(norm, rows, 9).backward()
            optimizer.synchronize_gradients()
            for param in norm.parameters():
                param.grad = param.grad.clamp(-0.5, 0.5)
            optimizer.step()
            found[-1] += [param.detach().clone() for param in norm.parameters()]
    return [found[0], found[1][: len(found[0])]]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "zero1", "masters"])
def test_sums_are_taken_once(options: dict[str, Any]):
    for ours, whole in run_ranks(loops, 2, options):
        torch.testing.assert_close(ours, whole)


def shared_norm(order: tuple[int, int]) -> list[list[Tensor]]:
    """The gradients that two optimizers of the same norm make of two backward passes, and of those after zeroing."""
    here, found = current_context().tp.rank, []
    for rows in (slice(here, here + 1), slice(0, 2)):
        norm, other = LayerNorm(4, sequence_parallel_enabled=rows != slice(0, 2)), torch.nn.Parameter(torch.ones(2))
        options: dict[str, Any] = {"grad_clipping": False, "defaults": {"lr": 0.0}}
        optimizers = [
            NxDOptimizer(params, torch.optim.SGD, **options)
            for params in ([*norm.parameters(), other], norm.parameters())
        ]
        found.append([])
        for seed, zeroing in ((1, True), (2, False), (3, False), (4, True)):
            loss(norm, rows, seed).backward()
            for number in order:
                optimizers[number].step()
            found[-1] += [param.grad.clone() for param in norm.parameters()]
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=zeroing)
    return found


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_optimizers_take_a_sum_once(order: tuple[int, int]):
    for ours, whole in run_ranks(shared_norm, 2, order):
        torch.testing.assert_close(ours, whole)
