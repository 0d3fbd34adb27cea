"""GQAQKVColumnParallelLinear equals three nn.Linear, forward and backward, with heads replicated and padded."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.layout import weight_layout
from nxd_infer.layout.merge import merge_state_dicts
from nxd_infer.modules.qkv_linear import PARTS, GQAQKVColumnParallelLinear
from tests.support.parallel_layers.compare import LIMITS, as_on_ranks, error, failures
from tests.support.ranks import run_ranks

HIDDEN = 12


def plain(q: int, kv: int, bias: bool, dtype: torch.dtype) -> dict[str, nn.Linear]:
    torch.manual_seed(3)
    sizes = {"q": q, "k": kv, "v": kv}
    return {part: nn.Linear(HIDDEN, sizes[part], bias=bias, dtype=dtype) for part in PARTS}


def module(q: int, kv: int, dtype: torch.dtype, **options) -> GQAQKVColumnParallelLinear:
    torch.manual_seed(3)
    return GQAQKVColumnParallelLinear(HIDDEN, [q, kv], dtype=dtype, **options)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(*shape, dtype=dtype)


def grad_of(layer: GQAQKVColumnParallelLinear, part: str, kind: str) -> Tensor:
    """This rank's gradient of one projection."""
    if not layer.fuse_qkv:
        return layer.get_parameter(f"{kind}_{part}").grad
    q, kv = layer.q_output_size_per_partition, layer.kv_output_size_per_partition
    return layer.get_parameter(f"{kind}_qkv").grad.split([q, kv, kv])[PARTS.index(part)]


def compare(found: dict[str, float], name: str, layer: GQAQKVColumnParallelLinear, x: Tensor, options: dict) -> None:
    dtype, tp = x.dtype, current_context().tp
    references = plain(layer.q_size, layer.kv_size, layer.use_bias, dtype)
    sequence = options.get("sequence_parallel_enabled", False)
    mine = (x.chunk(tp.degree)[tp.rank] if sequence else x).clone().requires_grad_()
    x_plain = x.clone().requires_grad_()
    outputs, loss, loss_plain = layer(mine), 0.0, 0.0
    for part, y in zip(PARTS, outputs, strict=True):
        expected, place = as_on_ranks(layer, part, references[part](x_plain))
        # Every place on the ranks has its own weight in the loss; an element counts as often as it is there.
        weights = random(*expected.shape, dtype=dtype, seed=9)
        found[f"{name} {part}"] = error(y, place(expected))
        loss, loss_plain = loss + (y * place(weights)).sum(), loss_plain + (expected * weights).sum()
    loss.backward()
    loss_plain.backward()
    grad = x_plain.grad.chunk(tp.degree)[tp.rank] if sequence else x_plain.grad
    found[f"{name} input grad"] = error(mine.grad, grad)
    for part, kind in itertools.product(PARTS, ("weight", "bias") if layer.use_bias else ("weight",)):
        index = (layer.q_plan if part == "q" else layer.kv_plan).rank_index(tp.degree, tp.rank)
        whole = getattr(references[part], kind).grad
        own = torch.cat([whole, whole.new_zeros(1, *whole.shape[1:])]).index_select(0, index)
        found[f"{name} {part} {kind} grad"] = error(grad_of(layer, part, kind), own)


def all_cases(dtype: torch.dtype) -> list[str]:
    found: dict[str, float] = {}
    x = random(8, 2, HIDDEN, dtype=dtype, seed=1)
    sizes = [(16, 8, None), (16, 8, 2), (12, 4, 4), (20, 20, 4), (6, 2, 2)]
    ways = itertools.cycle(itertools.product((True, False), repeat=3))  # each size with three of eight
    for (q, kv, d), (bias, gather, fuse) in zip(sizes * 3, ways, strict=False):
        options = {"bias": bias, "gather_output": gather, "fuse_qkv": fuse}
        compare(found, f"{q}/{kv} d={d} {options}", module(q, kv, dtype, head_dim=d, **options), x, options)
    for gather, multiplier, d in ((True, 2, 2), (False, 4, 2), (True, 4, None), (False, 2, None)):
        options = {"gather_output": gather, "kv_size_multiplier": multiplier, "head_dim": d, "fuse_qkv": gather}
        compare(found, f"multiplier {options}", module(16, 4, dtype, **options), x, options)
    options = {"sequence_parallel_enabled": True, "gather_output": False}
    compare(found, "sequence", module(16, 8, dtype, **options), x, options)
    return failures(found, LIMITS[dtype])


def attention_of_one_head_a_rank() -> float:
    """Without ``head_dim``, on as many ranks as there are copies of key/value heads: the error of the attention."""
    x, d, tp = random(2, 5, HIDDEN, dtype=torch.float64, seed=5), 2, current_context().tp
    references = plain(8 * d, 2 * d, True, torch.float64)
    expected = attention(*(references[part](x) for part in PARTS), d)
    layer = module(8 * d, 2 * d, torch.float64, gather_output=False, kv_size_multiplier=2)
    return error(attention(*layer(x), d), expected.chunk(tp.degree, -1)[tp.rank])


def test_one_key_value_head_a_rank():
    assert max(run_ranks(attention_of_one_head_a_rank, 4)) < 1e-10


def attention(q: Tensor, k: Tensor, v: Tensor, d: int) -> Tensor:
    """Grouped-query attention over [batch, sequence, heads * d]; the j-th kv head serves the j-th run of queries."""
    q, k, v = (t.unflatten(-1, (-1, d)).transpose(1, 2) for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


@pytest.mark.filterwarnings("ignore:kv_size_multiplier")
@pytest.mark.parametrize(("tp", "dtype"), [(1, torch.float64), (2, torch.float32), (4, torch.float64)], ids=str)
def test_equal_to_plain(tp: int, dtype: torch.dtype):
    for rank, bad in enumerate(run_ranks(all_cases, tp, dtype) if tp > 1 else [all_cases(dtype)]):
        assert not bad, f"rank {rank}: " + "; ".join(bad)


def states_of(names: dict[str, str]) -> list[dict[str, Tensor]]:
    return [named(fuse, names).state_dict() for fuse in (True, False)]


def named(fuse: bool, names: dict[str, str]) -> GQAQKVColumnParallelLinear:
    return module(16, 8, torch.float32, fuse_qkv=fuse, logical_names=names, head_dim=4)


def test_logical_names():
    """The ranks' fused or separate parameters merge into the same logical tensors under the names asked for."""
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}
    references = plain(16, 8, True, torch.float32)
    for fuse, states in zip((True, False), zip(*run_ranks(states_of, 4, names), strict=True), strict=True):
        merged = merge_state_dicts(states, weight_layout(named(fuse, names)))
        assert set(merged) == {f"{part}_proj.{kind}" for part in PARTS for kind in ("weight", "bias")}
        for part in PARTS:
            assert torch.equal(merged[f"{part}_proj.weight"], references[part].weight)
            assert torch.equal(merged[f"{part}_proj.bias"], references[part].bias)
