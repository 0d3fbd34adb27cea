"""Gradients of sequence-parallel parameters are summed over the ranks once, whatever a loop does with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nxd_infer.context import current_context
from nxd_infer.optimizer import NxDOptimizer
from nxd_infer.parallel_layers.grads import allreduce_sequence_parallel_gradients
from nxd_infer.parallel_layers.layer_norm import LayerNorm
from tests.support.ranks import run_ranks
from tests.support.trainer.jobs import training
from tests.support.trainer.models import llama, tokens

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


def summed_without_the_wrapper() -> list[float]:
    """allreduce_sequence_parallel_gradients gives a plain optimizer what the wrapper has."""
    model, optimizer = training(llama, sequence_parallel=True)
    model.run_train(**tokens())
    allreduce_sequence_parallel_gradients(torch.optim.SGD(model.parameters(), lr=1.0))
    mine_ = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.zero_grad()
    model.run_train(**tokens())
    whole = optimizer.named_gradients()
    return [float((whole[name] - grad).abs().max()) for name, grad in mine_.items()]


def test_sequence_parallel_gradients_without_the_wrapper():
    for gaps in run_ranks(summed_without_the_wrapper, 2):
        assert max(gaps) < 1e-7
