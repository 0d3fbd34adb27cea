"""Embeddings, linear layers and convolutions equal PyTorch's, forward and backward, with every option."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.errors import ShardingError
from nxd_infer.layout import AxisPlan
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_infer.parallel_layers import (
    ColumnParallelLinear,
    OutputChannelParallelConv2d,
    ParallelEmbedding,
    RowParallelLinear,
    mappings,
)
from nxd_infer.parallel_layers.layers import InputChannelParallelConv2d
from tests.support.parallel_layers.compare import LIMITS, error, failures, own_part, piece
from tests.support.ranks import run_ranks

VOCABULARY, WIDTH = 12, 8


def pair(dtype: torch.dtype, size: int = VOCABULARY, width: int = WIDTH, options: dict | None = None, **shared):
    torch.manual_seed(11)
    layer = ParallelEmbedding(size, width, dtype=dtype, **(options or {}), **shared)
    torch.manual_seed(11)
    return layer, nn.Embedding(size, width, dtype=dtype, **shared)


def ids_of(*shape: int) -> Tensor:
    torch.manual_seed(5)
    return torch.randint(0, VOCABULARY, shape)


def compare_tables(
    found: dict[str, float], name: str, options: dict, ids: Tensor, dtype: torch.dtype, **shared
) -> None:
    """``shared``: what both layers are given; ``size``, ``width``: of the table."""
    sizes = [shared.pop(key, default) for key, default in (("size", VOCABULARY), ("width", WIDTH))]
    layer, reference = pair(dtype, *sizes, options, **shared)
    dim = options.get("sequence_dimension")
    found[f"{name} init"] = truth(torch.equal(layer.weight, own_part(layer, "weight", reference.weight)))
    y, expected = layer(ids), reference(ids)
    weights = torch.linspace(-1, 1, expected.numel(), dtype=dtype).view_as(expected)
    (y * (weights if dim is None else piece(weights, dim))).sum().backward()
    (expected * weights).sum().backward()
    found[name] = error(y, expected if dim is None else piece(expected, dim))
    found[f"{name} table"] = error(layer.weight, own_part(layer, "weight", reference.weight.detach()))
    grads = [g.to_dense() if g.is_sparse else g for g in (layer.weight.grad, reference.weight.grad)]
    found[f"{name} grad"] = error(grads[0], own_part(layer, "weight", grads[1]))
    found[f"{name} sparse"] = truth(layer.weight.grad.is_sparse is shared.get("sparse", False))


def embedding_cases(dtype: torch.dtype) -> list[str]:
    found: dict[str, float] = {}
    tables = [
        {},
        {"padding_idx": -2},
        {"max_norm": 2.0, "norm_type": 1.0},
        {"max_norm": 0.5, "norm_type": math.inf},
        {"max_norm": 1.5, "padding_idx": 3, "scale_grad_by_freq": True},
        {"sparse": True, "padding_idx": 0},
    ]
    for across in (False, True):
        options: dict[str, Any] = {"shard_across_embedding": across}
        for shape, shared in zip([(6,), (4, 6), (2, 3, 4)] * 2, tables, strict=True):
            compare_tables(found, f"{shape} across={across} {shared}", options, ids_of(*shape), dtype, **shared)
        for dim in (0, 1):
            split = {"sequence_parallel_enabled": True, "sequence_dimension": dim, **options}
            compare_tables(found, f"sequence {dim} across={across}", split, ids_of(8, 4), dtype)
        ids = torch.tensor([[0, 12, 5, 6], [12, 3, 7, 0]])  # sizes that do not divide, padded
        compare_tables(found, f"pad across={across}", {"pad": True, **options}, ids, dtype, size=13, width=7)
        layer, reference = pair(dtype, options={"collect_output": False, **options})
        part, whole, tp = layer(ids_of(5)), reference(ids_of(5)), current_context().tp
        own = (ids_of(5) // (VOCABULARY // tp.degree)) == tp.rank
        held = piece(whole, -1) if across else torch.where(own[:, None], whole, 0.0)
        found[f"own part across={across}"] = error(part, held)
    return failures(found, LIMITS[dtype])


def low_precision() -> list[str]:
    """The output has the table's type and its exact values: a sum with zeros rounds nothing."""
    bad = []
    for dtype, across in ((torch.bfloat16, False), (torch.float16, True)):
        layer, reference = pair(dtype, options={"shard_across_embedding": across})
        y, expected = layer(ids_of(3, 4)), reference(ids_of(3, 4))
        if y.dtype != dtype or not torch.equal(y, expected):
            bad.append(f"{dtype} across={across}: {y.dtype}")
    return bad


def refused() -> list[str]:
    """What is told of an id outside the vocabulary, split either way, and of sizes that do not divide."""
    said = []
    for layer, bad in (
        (pair(torch.float32)[0], VOCABULARY),
        (pair(torch.float32, options={"shard_across_embedding": True})[0], -1),
        (ParallelEmbedding(9, 4), 1),
        (ParallelEmbedding(8, 5, shard_across_embedding=True), 1),
    ):
        try:
            layer(torch.tensor([1, bad]))
        except (IndexError, ShardingError) as problem:
            said.append(f"{type(problem).__name__}: {problem}")
    return said


def dropped_in_place() -> float:
    """As BERT's embeddings do: the piece of the sequence is changed in place, and its gradient comes back."""
    layer = ParallelEmbedding(8, 4, sequence_parallel_enabled=True, shard_across_embedding=True)
    layer(torch.zeros(4, 2, dtype=torch.int64)).mul_(2).sum().backward()
    return layer.weight.grad.sum().item()


def embeddings_on_two_ranks() -> tuple[list[str], list[str], float]:
    return low_precision(), refused(), dropped_in_place()


def test_embeddings_on_two_ranks():
    """Types are kept, and an id outside the vocabulary is an IndexError: the reference returns zeros at degree 2."""
    for low, (above, below, rows, width), summed in run_ranks(embeddings_on_two_ranks, 2):
        assert low == [] and summed == 32.0
        assert above.startswith("IndexError") and str(VOCABULARY) in above and below.startswith("IndexError")
        assert "ShardingError: " in rows and "num_embeddings = 9 does not divide over 2 ranks" in rows
        assert "embedding_dim = 5 does not divide over 2 ranks" in width


SHAPES = [(8,), (4, 8), (2, 4, 8)]
IN, OUT = 12, 16


def plain(dtype: torch.dtype, bias: bool, size_in: int = IN, size_out: int = OUT) -> nn.Linear:
    torch.manual_seed(7)
    return nn.Linear(size_in, size_out, bias=bias, dtype=dtype)


def column(dtype: torch.dtype, bias: bool, size_in: int = IN, size_out: int = OUT, **options) -> ColumnParallelLinear:
    torch.manual_seed(7)
    return ColumnParallelLinear(size_in, size_out, bias=bias, dtype=dtype, **options)


def row(dtype: torch.dtype, bias: bool, size_in: int = OUT, size_out: int = IN, **options) -> RowParallelLinear:
    torch.manual_seed(7)
    return RowParallelLinear(size_in, size_out, bias=bias, dtype=dtype, **options)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(len(shape) + sum(shape))
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def truth(good: bool) -> float:
    """As the other cases have it: an error."""
    return 0.0 if good else float("inf")


def check(
    found: dict[str, float],
    name: str,
    pairs: list[tuple[nn.Module, nn.Module]],
    x: Tensor,
    split_in: int | None = None,
    split_out: int | None = None,
) -> None:
    """Forward and backward through our layers and the plain ones; the dimensions of which a rank has its piece."""

    def mine(whole: Tensor, dim: int | None) -> Tensor:
        return whole if dim is None else piece(whole, dim)

    expected = x_plain = x.detach().clone().requires_grad_()
    y = x_mine = mine(x, split_in).detach().clone().requires_grad_()
    for number, (layer, reference) in enumerate(pairs):
        y, expected = layer(torch.tanh(y) if number else y), reference(torch.tanh(expected) if number else expected)
        if isinstance(y, tuple):  # skip_bias_add
            y = y[0] if y[1] is None else y[0] + y[1]
    found[name] = error(y, mine(expected, split_out))
    weights = torch.linspace(-1, 2, expected.numel(), dtype=x.dtype).view_as(expected)
    (y * mine(weights, split_out)).sum().backward()
    (expected * weights).sum().backward()
    found[f"{name} input grad"] = error(x_mine.grad, mine(x_plain.grad, split_in))
    for number, (layer, reference) in enumerate(pairs):
        for parameter in ("weight", "bias"):
            ours, theirs = getattr(layer, parameter), getattr(reference, parameter)
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                what = f"{name} {parameter} of {number}"
                found[what] = truth(torch.equal(ours, own_part(layer, parameter, theirs.detach())))
                found[f"{what} grad"] = error(ours.grad, own_part(layer, parameter, theirs.grad))


def layer_cases(dtype: torch.dtype) -> dict[str, float]:
    """``whole``: gather a column's output, or split a row's input."""
    found: dict[str, float] = {}
    shapes = itertools.cycle(SHAPES)
    for bias, whole, skip in itertools.product((True, False), repeat=3):
        shape, split = next(shapes), None if whole else -1
        name = f"{shape} bias={bias} whole={whole} skip={skip}"
        up = column(dtype, bias, gather_output=whole, skip_bias_add=skip)
        check(found, f"column {name}", [(up, plain(dtype, bias))], random(*shape, IN, dtype=dtype), split_out=split)
        down, reference = row(dtype, bias, input_is_parallel=not whole, skip_bias_add=skip), plain(dtype, bias, OUT, IN)
        check(found, f"row {name}", [(down, reference)], random(*shape, OUT, dtype=dtype), split_in=split)
    return found


def sequence_cases(dtype: torch.dtype) -> dict[str, float]:
    """A column and a row layer with the sequence split outside of them, in each dimension."""
    found: dict[str, float] = {}
    for dim, shape, bias in ((0, (8, 2), True), (1, (2, 8), False), (-2, (3, 8), True), (None, (4, 2, 3), False)):
        name = f"sequence dim={dim} bias={bias}"
        options = {"sequence_parallel_enabled": True, "sequence_dimension": dim}
        up = column(dtype, bias, gather_output=False, **options)
        down = row(dtype, bias, input_is_parallel=True, **options)
        x, at = random(*shape, IN, dtype=dtype), dim or 0
        check(found, name, [(up, plain(dtype, bias)), (down, plain(dtype, bias, OUT, IN))], x, at, at)
        gathered = column(dtype, True, gather_output=True, **options)
        found[f"{name} gathered"] = error(gathered(piece(x, at)), plain(dtype, True)(x))
        alone = row(dtype, False, input_is_parallel=True, reduce_output=False, **options)
        parts = alone(piece(random(*shape, OUT, dtype=dtype), -1))
        summed = mappings.reduce_from_tensor_model_parallel_region(parts)
        found[f"{name} partial"] = error(summed, plain(dtype, False, OUT, IN)(random(*shape, OUT, dtype=dtype)))
    return found


def plan_cases(dtype: torch.dtype) -> dict[str, float]:
    """Padded, strided and head-wise axes; a padded pair computes what the plain pair does, forward and backward."""
    found: dict[str, float] = {}
    plans = {
        "padded": AxisPlan.padded(10),
        "heads": AxisPlan.heads(5, 2),
        "strided": AxisPlan.strided(24, 3),
        "sections": AxisPlan.sections([AxisPlan.heads(3, 2), AxisPlan.heads(1, 4)]),
    }
    x = random(3, IN, dtype=dtype)
    for (name, plan), gather in itertools.product(plans.items(), (True, False)):
        size = plan.size
        first, second = plain(dtype, True, IN, size), plain(dtype, True, size, IN)
        up = column(dtype, True, IN, size, gather_output=gather, output_plan=plan)
        down = row(dtype, True, size, IN, input_is_parallel=not gather, input_plan=plan)
        if gather:
            found[f"plan {name} gathered"] = error(up(x), first(x))
        check(found, f"plan {name} gather={gather}", [(up, first), (down, second)], x)
    # stride= and pad= are short for plans
    layer = column(dtype, True, IN, 24, stride=3, gather_output=True)
    found["stride"] = error(layer(x), plain(dtype, True, IN, 24)(x))
    layer = column(dtype, False, IN, 10, pad=True, pad_alignment_size_per_rank=8, keep_padded_output=True)
    y = layer(x)
    step = 8 * current_context().tp.degree
    found["pad shape"] = truth(y.shape[-1] == step * -(-10 // step))
    found["pad"] = error(y[..., :10], plain(dtype, False, IN, 10)(x))
    found["pad never wins"] = truth(bool((y[..., 10:] == torch.finfo(dtype).min).all()))
    for features in (7, 12):
        try:
            row(dtype, True, 8, 3, stride=2)(random(2, features, dtype=dtype))
            found[f"stride {features} features"] = float("inf")
        except ShardingError:
            found[f"stride {features} features"] = 0.0
    return found


def master_weights() -> dict[str, float]:
    """The whole initial values in float32, of every layer that keeps them; None without a bias, or unasked."""
    narrow = {"dtype": torch.bfloat16, "keep_master_weight": True}
    layers = {
        "column": (ColumnParallelLinear(8, 16, gather_output=False, **narrow), 16),
        "row": (RowParallelLinear(16, 8, **narrow), 8),
        "conv": (OutputChannelParallelConv2d(8, 16, 1, **narrow), 16),
    }
    found = {}
    for name, (layer, size) in layers.items():
        assert layer.master_bias.shape == (size,) and layer.master_bias.dtype == torch.float32
        for kind in ("weight", "bias"):
            own = own_part(layer, kind, getattr(layer, f"master_{kind}")).bfloat16()
            found[f"master {kind} {name}"] = truth(torch.equal(own, getattr(layer, kind)))
    qkv = GQAQKVColumnParallelLinear(8, [16, 8], **narrow)
    found["master bias qkv"] = truth(qkv.master_bias.shape == (32,))
    without = ColumnParallelLinear(8, 16, bias=False, keep_master_weight=True), ColumnParallelLinear(8, 16)
    found["no master bias"] = truth(all(layer.master_bias is None for layer in without))
    return found


def image(channels: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(channels)
    return torch.randn(2, channels, 7, 6, dtype=dtype)


def make(kind: type, *sizes: int, **options) -> nn.Module:
    torch.manual_seed(13)
    return kind(*sizes, **options)


def conv_cases(dtype: torch.dtype) -> dict[str, float]:
    """Each geometry with some of the options: a bias, whole images outside, a number of channels to be padded."""
    found: dict[str, float] = {}
    geometries = [
        ({}, True, True, True),
        ({"stride": 2, "padding": 1}, True, False, False),
        ({"padding": (2, 1), "dilation": (1, 2)}, False, True, False),
        ({"padding": "same", "padding_mode": "reflect"}, True, True, False),
        ({"padding": 1, "padding_mode": "circular"}, False, False, False),
        ({"padding": "valid", "padding_mode": "replicate"}, False, True, True),
    ]
    kinds = (OutputChannelParallelConv2d, InputChannelParallelConv2d)
    for kind, (geometry, bias, whole, pad) in itertools.product(kinds, geometries):
        output, outs = kind is OutputChannelParallelConv2d, 6 if pad else 8
        name = f"{kind.__name__} {geometry} bias={bias} whole={whole} pad={pad}"
        sizes = (4, outs, (3, 2)) if output else (outs, 4, (3, 2))
        options = {"gather_output": whole} if output else {"input_is_parallel": not whole}
        shared = {"bias": bias, "dtype": dtype, **geometry}
        layer = make(kind, *sizes, **shared, **options, partition_pad=pad)
        ends = (None, 1) if output else (1, None)
        pairs = [(layer, make(nn.Conv2d, *sizes, **shared))]
        check(found, name, pairs, image(sizes[0], dtype), *((None, None) if whole else ends))
    single = make(OutputChannelParallelConv2d, 4, 8, 3, dtype=dtype)(image(4, dtype)[0])
    found["one image"] = error(single, make(nn.Conv2d, 4, 8, 3, dtype=dtype)(image(4, dtype)[0]))
    return found


def all_cases(dtype: torch.dtype) -> list[str]:
    found = layer_cases(dtype) | sequence_cases(dtype) | plan_cases(dtype) | master_weights() | conv_cases(dtype)
    assert len(found) > 200
    return embedding_cases(dtype) + failures(found, LIMITS[dtype])


@pytest.mark.parametrize(
    ("tp", "dtype", "transport"),
    [(1, torch.float64, None), (2, torch.float32, "shm"), (2, torch.float64, "gloo"), (4, torch.float32, "gloo")],
    ids=str,
)
def test_equal_to_plain(tp: int, dtype: torch.dtype, transport):
    """Also over shared memory alone, as the rank processes of one host have it."""
    ranks = run_ranks(all_cases, tp, dtype, collectives=transport) if transport else [all_cases(dtype)]
    for rank, bad in enumerate(ranks):
        assert not bad, f"rank {rank}: " + "; ".join(bad)
