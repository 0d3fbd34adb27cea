"""clip_grad_norm: the norm of the whole model's gradients, however its parameters lie on the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxd_infer import parallel_state
from nxd_infer.context import LOCAL, current_context, use_context
from nxd_infer.layout import shard_state_dict, weight_layout
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_infer.optimizer import NxDOptimizer
from nxd_infer.parallel_layers.grads import clip_grad_norm, get_grad_norm
from tests.support.ranks import run_ranks
from tests.support.trainer.models import MLP, decoder

F64 = torch.float64

ORDERS = (0.5, 1, 2, 3.0, "inf")


def logical_gradients(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """A random gradient for every logical tensor of a model, in the type of its first parameter."""
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    shapes: dict[str, tuple[int, ...]] = {}
    for layout in weight_layout(model).values():
        if not layout.alias_of:
            shapes.update(layout.logical_shapes)
    return {name: torch.randn(shape, dtype=dtype, generator=generator) for name, shape in shapes.items()}


def give(model: nn.Module, logical: dict[str, Tensor]) -> None:
    tp = current_context().tp
    mine = shard_state_dict(model, logical, tp.rank, tp.degree)
    for name, param in model.named_parameters():
        param.grad = mine[name].clone()


def build(name: str) -> nn.Module:
    return MLP(F64) if name == "mlp" else decoder(name, F64)


def norms(name: str) -> list[str]:
    """On one rank: all norms and the clipped gradients against torch over the logical gradients."""
    wrong: list[str] = []
    model = build(name)
    with use_context(LOCAL):
        logical = logical_gradients(build(name))
    for order in ORDERS:
        give(model, logical)
        whole = [nn.Parameter(torch.zeros_like(g)) for g in logical.values()]
        for param, grad in zip(whole, logical.values(), strict=True):
            param.grad = grad.clone()
        wanted = torch.nn.utils.clip_grad_norm_(whole, 0.7, float(order))
        alone = get_grad_norm((p for p in model.parameters()), order)
        found = clip_grad_norm((p for p in model.parameters()), 0.7, norm_type=order)
        if not torch.allclose(found, wanted, rtol=1e-12) or not torch.equal(alone, found) or found.dim():
            wrong.append(f"norm {order}: {found} for {wanted}")
        clipped = {n: p.grad for n, p in zip(logical, whole, strict=True) if p.grad is not None}
        tp = current_context().tp
        for key, piece in shard_state_dict(model, clipped, tp.rank, tp.degree).items():
            grad = dict(model.named_parameters(remove_duplicate=False))[key].grad
            if grad is None or not torch.allclose(grad, piece, rtol=1e-10, atol=0):
                wrong.append(f"norm {order}: {key} is not clipped as the whole")
    return wrong


MODELS = ("tied", "odd_heads", "biases", "mlp")


def all_norms() -> list[str]:
    wrong = []
    for tp in (1, 2, 4):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tp)
        wrong += [f"{name} at tp {tp}: {line}" for name in MODELS for line in norms(name)]
    return wrong


def test_norms_over_ranks():
    for rank, wrong in enumerate(run_ranks(all_norms, 4)):
        assert not wrong, f"rank {rank}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("head_dim", [None, 3])
def test_copies_on_one_rank_count_once(head_dim: int | None):
    layer = GQAQKVColumnParallelLinear(6, [12, 6], bias=False, kv_size_multiplier=2, head_dim=head_dim, dtype=F64)
    logical = logical_gradients(layer)
    give(layer, logical)
    wanted = torch.nn.utils.get_total_norm(list(logical.values()))
    assert torch.allclose(get_grad_norm(layer.parameters()), wanted, rtol=1e-12)


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
