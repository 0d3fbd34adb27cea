"""Column- and row-parallel linear layers and convolutions equal PyTorch's, forward and backward, with every option."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.errors import ShardingError
from nxd_infer.layout import AxisPlan
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_infer.parallel_layers import ColumnParallelLinear, OutputChannelParallelConv2d, RowParallelLinear, mappings
from nxd_infer.parallel_layers.layers import InputChannelParallelConv2d
from tests.support.parallel_layers.compare import LIMITS, error, failures, own_part, piece
from tests.support.ranks import run_ranks

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


def compare_parameters(found: dict[str, float], name: str, layer: nn.Module, reference: nn.Module) -> None:
    for parameter in ("weight", "bias"):
        ours, theirs = getattr(layer, parameter), getattr(reference, parameter)
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            found[f"{name} {parameter}"] = truth(torch.equal(ours, own_part(layer, parameter, theirs.detach())))
            found[f"{name} {parameter} grad"] = error(ours.grad, own_part(layer, parameter, theirs.grad))


def layer_cases(dtype: torch.dtype) -> dict[str, float]:
    """``whole``: gather a column's output, or split a row's input."""
    found: dict[str, float] = {}
    shapes = itertools.cycle(SHAPES)
    for kind, bias, whole, skip in itertools.product(("column", "row"), (True, False), (True, False), (True, False)):
        shape = next(shapes)
        name = f"{kind} {shape} bias={bias} whole={whole} skip={skip}"
        if kind == "column":
            sizes, layer = (IN, OUT), column(dtype, bias, gather_output=whole, skip_bias_add=skip)
        else:
            sizes, layer = (OUT, IN), row(dtype, bias, input_is_parallel=not whole, skip_bias_add=skip)
        split_input, split_output = kind == "row" and not whole, kind == "column" and not whole
        reference = plain(dtype, bias, *sizes)
        x_plain = random(*shape, sizes[0], dtype=dtype)
        x = (piece(x_plain, -1) if split_input else x_plain).detach().clone().requires_grad_()
        y, weights = layer(x), random(*shape, sizes[1], dtype=dtype).detach()
        if skip:
            y, left = y
            y = y if left is None else y + left
        expected = reference(x_plain)
        found[name] = error(y, piece(expected, -1) if split_output else expected)
        (y * (piece(weights, -1) if split_output else weights)).sum().backward()
        (expected * weights).sum().backward()
        found[f"{name} input grad"] = error(x.grad, piece(x_plain.grad, -1) if split_input else x_plain.grad)
        compare_parameters(found, name, layer, reference)
    return found


def sequence_cases(dtype: torch.dtype) -> dict[str, float]:
    """A column and a row layer with the sequence split outside of them, in each dimension."""
    found: dict[str, float] = {}
    for dim, shape, bias in ((0, (8, 2), True), (1, (2, 8), False), (-2, (3, 8), True), (None, (4, 2, 3), False)):
        name = f"sequence dim={dim} bias={bias}"
        first, second = plain(dtype, bias), plain(dtype, bias, OUT, IN)
        options = {"sequence_parallel_enabled": True, "sequence_dimension": dim}
        up = column(dtype, bias, gather_output=False, **options)
        down = row(dtype, bias, input_is_parallel=True, **options)
        whole, x_plain = random(*shape, IN, dtype=dtype), random(*shape, IN, dtype=dtype)
        at = dim or 0
        x = piece(whole, at).detach().requires_grad_()
        weights = random(*shape, IN, dtype=dtype).detach() * 0.5
        y, expected = down(torch.tanh(up(x))), second(torch.tanh(first(x_plain)))
        found[name] = error(y, piece(expected, at))
        (y * piece(weights, at)).sum().backward()
        (expected * weights).sum().backward()
        found[f"{name} input grad"] = error(x.grad, piece(x_plain.grad, at))
        compare_parameters(found, f"{name} up", up, first)
        compare_parameters(found, f"{name} down", down, second)
        gathered = column(dtype, True, gather_output=True, **options)
        found[f"{name} gathered"] = error(gathered(piece(whole, at)), plain(dtype, True)(whole))
        alone = row(dtype, False, input_is_parallel=True, reduce_output=False, **options)
        parts = alone(piece(random(*shape, OUT, dtype=dtype), -1))
        summed = mappings.reduce_from_tensor_model_parallel_region(parts)
        expected = plain(dtype, False, OUT, IN)(random(*shape, OUT, dtype=dtype))
        found[f"{name} partial"] = error(summed, expected)
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
    for (name, plan), gather in itertools.product(plans.items(), (True, False)):
        size = plan.size
        first, second = plain(dtype, True, IN, size), plain(dtype, True, size, IN)
        up = column(dtype, True, IN, size, gather_output=gather, output_plan=plan)
        down = row(dtype, True, size, IN, input_is_parallel=not gather, input_plan=plan)
        x, x_plain = random(3, IN, dtype=dtype), random(3, IN, dtype=dtype)
        middle = up(x)
        if gather:
            found[f"plan {name} gathered"] = error(middle, first(x_plain))
        y, expected = down(torch.tanh(middle)), second(torch.tanh(first(x_plain)))
        y.square().sum().backward()
        expected.square().sum().backward()
        found[f"plan {name} gather={gather}"] = error(y, expected)
        found[f"plan {name} gather={gather} input grad"] = error(x.grad, x_plain.grad)
        compare_parameters(found, f"plan {name} gather={gather} up", up, first)
        compare_parameters(found, f"plan {name} gather={gather} down", down, second)
    # stride= and pad= are short for plans
    x = random(3, IN, dtype=dtype)
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
        reference = make(nn.Conv2d, *sizes, **shared)
        x_plain = image(sizes[0], dtype).requires_grad_()
        split_input = not output and not whole
        x = (piece(x_plain, 1) if split_input else x_plain).detach().clone().requires_grad_()
        y, expected = layer(x), reference(x_plain)
        found[name] = error(y, piece(expected, 1) if output and not whole else expected)
        y.pow(3).sum().backward()
        expected.pow(3).sum().backward()
        found[f"{name} input grad"] = error(x.grad, piece(x_plain.grad, 1) if split_input else x_plain.grad)
        compare_parameters(found, name, layer, reference)
    single = make(OutputChannelParallelConv2d, 4, 8, 3, dtype=dtype)(image(4, dtype)[0])
    found["one image"] = error(single, make(nn.Conv2d, 4, 8, 3, dtype=dtype)(image(4, dtype)[0]))
    return found


def all_cases(dtype: torch.dtype) -> list[str]:
    found = layer_cases(dtype) | sequence_cases(dtype) | plan_cases(dtype) | master_weights() | conv_cases(dtype)
    assert len(found) > 200
    return failures(found, LIMITS[dtype])


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
