"""Gradients of sequence-parallel parameters are summed over the ranks once, whatever a loop does with them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.optimizer import NxDOptimizer
from nxd_infer.parallel_layers.grads import allreduce_sequence_parallel_gradients, get_grad_norm
from nxd_infer.parallel_layers.layer_norm import LayerNorm, mark_sequence_parallel
from nxd_infer.parallel_layers.utils import set_tensor_model_parallel_attributes
from tests.support.ranks import run_ranks
from tests.support.trainer.jobs import training
from tests.support.trainer.models import llama, tokens

OPTIONS: list[dict[str, Any]] = [{}, {"zero1": True}, {"master_weights": torch.float64, "fp32_grad_acc": True}]


def loss(norm: nn.Module, rows: slice, seed: int) -> Tensor:
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


def plain_norm(marked: bool, zero1: bool) -> tuple[list[str], Tensor]:
    """Train a norm of PyTorch's, which knows nothing of ranks, on this rank's piece of the sequence."""
    norm, here = nn.RMSNorm(4), current_context().tp.rank
    if marked:
        mark_sequence_parallel(norm)
    optimizer = NxDOptimizer(norm.named_parameters(), torch.optim.SGD, zero1=zero1, defaults={"lr": 0.1})
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for seed in range(2):
            loss(norm, slice(here, here + 1), seed).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(one.message) for one in heard if "replicated parameters" in str(one.message)], norm.weight.detach()


@pytest.mark.parametrize("zero1", [False, True])
def test_a_norm_that_is_not_marked_is_named(zero1: bool):
    for heard, _ in run_ranks(plain_norm, 2, False, zero1):
        assert len(heard) == 1 and "weight" in heard[0] and "mark_sequence_parallel(module)" in heard[0]
    (silent, first), (_, second) = run_ranks(plain_norm, 2, True, zero1)
    assert not silent and torch.equal(first, second)


def norm_of_split() -> float:
    param = nn.Parameter(torch.zeros(3))
    set_tensor_model_parallel_attributes(param, True, 0, 1)
    param.grad = torch.full((3,), 2.0)
    return float(get_grad_norm([param]))


def test_a_parameter_that_ported_code_calls_parallel_counts_on_every_rank():
    assert run_ranks(norm_of_split, 2) == pytest.approx([24**0.5] * 2)
