"""clip_grad_norm: the norm of the whole model's gradients, however its parameters lie on the ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer import parallel_state
from nxd_infer.context import LOCAL, current_context, make_context, use_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.layout import shard_state_dict, weight_layout
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_infer.parallel_layers import grads
from nxd_infer.parallel_layers.grads import clip_grad_norm, counted_spans, get_grad_norm
from tests.support.ranks import run_ranks
from tests.support.trainer.models import MLP, decoder

F64 = torch.float64
ORDERS = (1, 2, 2.0, 3, 0.5, 100, math.inf, "inf")


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


MODELS = ("llama", "tied", "odd_heads", "biases", "mlp")


def all_norms(degrees: list[int]) -> list[str]:
    wrong = []
    for tp in degrees:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tp)
        wrong += [f"{name} at tp {tp}: {line}" for name in MODELS for line in norms(name)]
    return wrong


def test_norms_over_ranks():
    for rank, wrong in enumerate(run_ranks(all_norms, 4, [1, 2, 4])):
        assert not wrong, f"rank {rank}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("order", [1, 2, 3, math.inf])
def test_without_parallelism_it_is_torch(order: float, dtype: torch.dtype):
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(n, 3, dtype=dtype)) for n in (2, 5, 7)]
    for param in ours:
        param.grad = torch.randn_like(param) * 10
    ours.append(nn.Parameter(torch.zeros(2)))  # without a gradient
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    for mine, their in zip(ours, theirs, strict=True):
        their.grad = None if mine.grad is None else mine.grad.clone()
    found = nxd.parallel_layers.clip_grad_norm(ours, 1.0, order)
    assert torch.equal(found, torch.nn.utils.clip_grad_norm_(theirs, 1.0, order))
    for mine, their in zip(ours[:-1], theirs[:-1], strict=True):
        assert mine.grad is not None and their.grad is not None and torch.equal(mine.grad, their.grad)


def test_forms_of_parameters():
    param = nn.Parameter(torch.zeros(3))
    param.grad = torch.tensor([3.0, 0.0, 4.0])
    assert clip_grad_norm(param, 10) == 5  # one tensor
    assert clip_grad_norm((p for p in (param, param)), 10, norm_type="inf") == 4  # the same twice counts once
    assert clip_grad_norm((param,), 10.0) == 5
    assert clip_grad_norm([], 1.0) == 0
    assert get_grad_norm([nn.Parameter(torch.zeros(2))]) == 0
    assert torch.equal(param.grad, torch.tensor([3.0, 0.0, 4.0]))


def test_narrow_and_huge_gradients():
    half, wide = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(2))
    half.grad = torch.full((4096,), 1 + 1 / 128, dtype=torch.bfloat16)
    assert get_grad_norm([half]).dtype == torch.float32
    assert abs(float(get_grad_norm([half])) - 64 * (1 + 1 / 128)) < 1e-4
    wide.grad = torch.tensor([3e30, 4e30])
    norm = clip_grad_norm([wide], 1.0)  # the squares are no float32
    assert abs(float(norm) - 5e30) < 1e25
    assert torch.allclose(wide.grad, torch.tensor([0.6, 0.8]))
    sparse = nn.Embedding(5, 2, sparse=True)
    sparse(torch.tensor([1, 1, 3])).sum().backward()
    assert float(clip_grad_norm(sparse.parameters(), 1.0)) == pytest.approx(10**0.5)


@pytest.mark.parametrize("order", [0, -1, "two", math.nan, None])
def test_bad_orders(order: Any):
    with pytest.raises(ParallelConfigError, match="norm_type must be a positive number or 'inf'"):
        get_grad_norm([nn.Parameter(torch.zeros(2))], order)


def nonfinite_norms() -> list[float]:
    """Only the last rank's piece holds a NaN, then an infinity."""
    found = []
    model = decoder("llama", F64)
    with use_context(LOCAL):
        logical = logical_gradients(decoder("llama", F64))
    for value in (math.nan, math.inf):
        give(model, logical)
        if current_context().tp.rank == current_context().tp.degree - 1:
            grad = model.get_parameter("model.layers.0.mlp.up_proj.weight").grad
            assert grad is not None
            grad[0, 0] = value
        found += [float(get_grad_norm(model.parameters(), order)) for order in (1, 2, "inf")]
    return found


def test_nonfinite_norms_are_nonfinite_everywhere():
    for found in run_ranks(nonfinite_norms, 2):
        assert all(math.isnan(norm) for norm in found[:3]) and found[3:] == [math.inf] * 3


def spans_of_kv() -> list[tuple]:
    model = decoder("llama", F64)
    param = model.get_parameter("model.layers.0.self_attn.k_proj.weight")
    norm = model.get_parameter("model.norm.weight")
    return [counted_spans(param), counted_spans(norm), counted_spans(model.get_parameter("lm_head.weight"))]


def test_first_owners_count():
    """Two key/value heads on four ranks: ranks 0 and 2 count them. 61 words in fours of 16: the last row is filling."""
    kv, norms_, heads = zip(*run_ranks(spans_of_kv, 4), strict=True)
    assert kv == (((0, 256),), (), ((0, 256),), ())
    assert norms_ == (((0, 32),), (), (), ())
    assert heads == (((0, 512),),) * 4  # filling has no gradient, so it may be counted


def test_a_rank_without_gradients_takes_part_on_its_device(monkeypatch: pytest.MonkeyPatch):
    """As a stage whose weights are all frozen: NCCL does not take the host's tensors."""
    seen: list[str] = []

    def all_reduce(x: Tensor, *_: Any) -> Tensor:
        seen.append(x.device.type)
        return torch.zeros(x.shape, dtype=x.dtype)

    monkeypatch.setattr(grads, "transport_device", lambda: torch.device("meta"), raising=False)
    monkeypatch.setattr(grads.comm, "all_reduce", all_reduce)
    context = make_context(2, 0, tp=2)
    grads.total_norm([], 2.0, context)
    grads.nonfinite([None], context)
    assert seen == ["meta"] * 3


@pytest.mark.parametrize("head_dim", [None, 3])
def test_copies_on_one_rank_count_once(head_dim: int | None):
    layer = GQAQKVColumnParallelLinear(6, [12, 6], bias=False, kv_size_multiplier=2, head_dim=head_dim, dtype=F64)
    logical = logical_gradients(layer)
    give(layer, logical)
    wanted = torch.nn.utils.get_total_norm(list(logical.values()))
    assert torch.allclose(get_grad_norm(layer.parameters()), wanted, rtol=1e-12)


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_the_norm_of_a_large_parameter(order: float):
    """PyTorch's own, of all elements at once, is wrong by 3e-5."""
    param = nn.Parameter(torch.empty(2**21 + 7))
    param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.linalg.vector_norm(param.grad.double(), order)
    assert float(get_grad_norm([param], order)) == pytest.approx(float(wanted), rel=5e-6)
