"""Steps over ranks against the same steps of plain PyTorch; ranks that differ; gradients that are no numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxd_infer import comm, parallel_state
from nxd_infer.context import current_context
from nxd_infer.optimizer import NxDOptimizer
from nxd_infer.parallel_layers.grads import get_grad_norm
from tests.support.optimizer.loops import NAMES, check_low_precision, low_precision, poisoned
from tests.support.optimizer.steps import check_habits, compared, habits
from tests.support.ranks import run_ranks
from tests.support.trainer.jobs import AdamW, mine, training
from tests.support.trainer.models import mlp, vectors


def both_ways() -> list[str]:
    return compared(False) + compared(True)


def test_steps_over_ranks():
    for rank, found in enumerate(run_ranks(both_ways, 2, tp=1)):
        assert not found, f"rank {rank}:\n" + "\n".join(found)


def test_habits_over_ranks():
    for found in run_ranks(habits, 2, tp=1):
        check_habits(found, 2)


def replicated_only() -> list[Tensor]:
    """A model that every tensor-parallel rank holds whole; only the first of them counts it in the norm."""
    model = nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3))
    torch.manual_seed(0)
    for param in model.parameters():
        nn.init.normal_(param)
    optimizer = NxDOptimizer(model.parameters(), torch.optim.AdamW, max_grad_norm=0.1, defaults={"lr": 0.1})
    rows = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    norms = []
    for _ in range(20):
        model(rows).square().mean().backward()
        optimizer.step()
        norms.append(optimizer.grad_norm)
        optimizer.zero_grad()
    return [torch.stack(norms), *model.parameters()]


def test_replicas_stay_bit_equal():
    first, second = run_ranks(replicated_only, 2, tp=2)
    assert first[0].dtype == torch.float32
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(first, second, strict=True))


def norms_of_pieces() -> list[str]:
    """get_grad_norm over what ZeRO-1 steps of bfloat16 weights, after two backward passes, against torch."""
    found = []
    for masters in (True, False):
        torch.manual_seed(current_context().dp.rank)
        params = [nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in ((5, 3), (), (7,))]
        options: Any = {"zero1": True, "master_weights": masters, "fp32_grad_acc": masters, "bucket_cap_mb": 1e-4}
        optimizer = NxDOptimizer(params, torch.optim.SGD, max_grad_norm=0.1, defaults={"lr": 1.0}, **options)
        for _ in range(2):
            torch.stack([(p * torch.randn_like(p)).sum() for p in params]).sum().backward()
        whole = list(optimizer.named_gradients().values())
        for order in (1, 2, "inf"):
            wanted = torch.nn.utils.get_total_norm([g.float() for g in whole], float(order))
            norm = get_grad_norm([piece.tensor for piece in optimizer.pieces], order, zero1_optimizer=True)
            if norm.dtype != torch.float32 or not torch.allclose(norm, wanted, rtol=1e-6):
                found.append(f"masters={masters} {order}: {norm} for {wanted}")
        optimizer.step()
        length = torch.cat([p.detach().float().flatten() for p in params]).norm()
        if abs(float(length) - 0.1) > 1e-3:
            found.append(f"masters={masters}: stepped by {length}")
    return found


def test_norms_of_narrow_pieces():
    assert run_ranks(norms_of_pieces, 2, tp=1) == [[], []]


def poisoned_over_ranks() -> list:
    found = []
    for tp in (1, 2):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tp)
        found += [poisoned(False), poisoned(True)]
    return found


def test_nonfinite_gradients_on_one_rank():
    for found in run_ranks(poisoned_over_ranks, 2):
        assert found == [[NAMES, 1]] * 4


def test_master_weights_over_ranks():
    for found in run_ranks(low_precision, 2, True, tp=1):
        check_low_precision(found)


def overlapping() -> tuple[int, list[int], bool]:
    """How many buckets there are, how many are reduced by the end of each backward, and what becomes of a parameter
    without gradients."""
    model, optimizer = training(mlp, optimizer_config={"zero_one_enabled": True, "bucket_cap_mb": 0.001})
    buckets, begun = optimizer._reducer.buckets, []
    for _ in range(2):
        model.run_train(**mine(vectors()))
        begun.append(sum(bucket.pending is not None for bucket in buckets))
        optimizer.step()
        optimizer.zero_grad()
    untouched = torch.equal(model.unused, torch.ones(3)) and model.unused.grad is None
    # An optimizer that replaces another takes its hooks over.
    NxDOptimizer(model.parameters(), AdamW)
    model.run_train(**mine(vectors()))
    return len(buckets), [*begun, sum(bucket.pending is not None for bucket in buckets)], untouched


def test_buckets_are_reduced_during_the_backward():
    for buckets, begun, untouched in run_ranks(overlapping, 2, tp=1):
        # The bucket with the unused parameter waits for the end of the backward.
        assert begun == [buckets, buckets, 0] and buckets > 3 and untouched


def unequal_ranks() -> dict[str, Tensor]:
    """Ranks that do different things between backward and step still agree on what is reduced."""
    model, optimizer = training(mlp, optimizer_class=torch.optim.SGD)
    model.run_train(**mine(vectors()))
    if current_context().rank == 1:
        model.run_train(**mine(vectors()))  # a second pass, on one rank only
    optimizer.step()
    optimizer.zero_grad()
    if current_context().rank == 0:
        (model.unused * 2).sum().backward()  # and a parameter that only this rank uses
    model.run_train(**mine(vectors()))
    optimizer.step()
    return model.state_dict()


def test_ranks_that_differ():
    first, second = run_ranks(unequal_ranks, 2, tp=1)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["unused"], torch.ones(3))


def collective_before_the_step(zero1: bool) -> list[Tensor]:
    """In turns one rank does not use a parameter, and the loop averages the loss between backward and step."""
    context = current_context()
    first, second = (torch.nn.Parameter(torch.full((3,), 2.0)) for _ in range(2))
    optimizer = NxDOptimizer([first, second], torch.optim.SGD, zero1=zero1, grad_clipping=False, defaults={"lr": 0.5})
    found = []
    for step in range(4):
        for part in range(1 + step // 2):
            loss = first.sum() + (second.sum() if (context.rank + step + part) % 2 else 0)
            loss.backward()
            found.append(comm.all_reduce(loss.detach(), context, "dp"))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, first.detach(), second.detach()]


@pytest.mark.parametrize("zero1", [False, True])
def test_a_collective_of_the_loop_before_the_step(zero1: bool):
    first = torch.nn.Parameter(torch.full((3,), 2.0))
    second, losses = first.detach().clone(), []
    for parts in (1, 1, 2, 2):  # every pass gives the second one half of the first one's gradient
        losses += [(2 * first.sum() + second.sum()).detach()] * parts
        first, second = first.detach() - 0.5 * parts, second - 0.25 * parts
    for found in run_ranks(collective_before_the_step, 2, zero1, tp=1):
        torch.testing.assert_close(found, [*losses, first, second])
