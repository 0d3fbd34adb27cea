"""Column- and row-parallel linear layers equal nn.Linear, forward and backward, at every degree and option."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.errors import ShardingError
from nxd_infer.layout import AxisPlan
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_infer.parallel_layers import ColumnParallelLinear, OutputChannelParallelConv2d, RowParallelLinear, mappings
from tests.support.parallel_layers.compare import LIMITS, error, failures, own_part, piece
from tests.support.ranks import run_ranks

SHAPES = {"2-D": (8,), "3-D": (4, 8), "4-D": (2, 4, 8)}
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


def compare_parameters(found: dict[str, float], name: str, layer: nn.Module, reference: nn.Linear) -> None:
    for parameter in ("weight", "bias"):
        ours, theirs = getattr(layer, parameter), getattr(reference, parameter)
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            part = own_part(layer, parameter, theirs.detach())
            found[f"{name} {parameter}"] = 0.0 if torch.equal(ours, part) else float("inf")
            found[f"{name} {parameter} grad"] = error(ours.grad, own_part(layer, parameter, theirs.grad))


def column_cases(dtype: torch.dtype) -> dict[str, float]:
    found: dict[str, float] = {}
    for shape_name, shape in SHAPES.items():
        for bias in (True, False):
            for gather in (True, False):
                for skip in (True, False):
                    name = f"column {shape_name} bias={bias} gather={gather} skip={skip}"
                    reference, layer = plain(dtype, bias), column(dtype, bias, gather_output=gather, skip_bias_add=skip)
                    x, x_plain = random(*shape, IN, dtype=dtype), random(*shape, IN, dtype=dtype)
                    y, weights = layer(x), random(*shape, OUT, dtype=dtype).detach()
                    if skip:
                        y, left = y
                        y = y if left is None else y + left
                    expected = reference(x_plain)
                    part = (lambda t: t) if gather else (lambda t: piece(t, -1))
                    found[name] = error(y, part(expected))
                    (y * part(weights)).sum().backward()
                    (expected * weights).sum().backward()
                    found[f"{name} input grad"] = error(x.grad, x_plain.grad)
                    compare_parameters(found, name, layer, reference)
    return found


def row_cases(dtype: torch.dtype) -> dict[str, float]:
    found: dict[str, float] = {}
    for shape_name, shape in SHAPES.items():
        for bias in (True, False):
            for parallel in (True, False):
                for skip in (True, False):
                    name = f"row {shape_name} bias={bias} parallel={parallel} skip={skip}"
                    reference = plain(dtype, bias, OUT, IN)
                    layer = row(dtype, bias, input_is_parallel=parallel, skip_bias_add=skip)
                    whole, x_plain = random(*shape, OUT, dtype=dtype), random(*shape, OUT, dtype=dtype)
                    x = (piece(whole, -1) if parallel else whole).detach().requires_grad_()
                    y, weights = layer(x), random(*shape, IN, dtype=dtype).detach()
                    if skip:
                        y, left = y
                        y = y if left is None else y + left
                    expected = reference(x_plain)
                    found[name] = error(y, expected)
                    (y * weights).sum().backward()
                    (expected * weights).sum().backward()
                    found[f"{name} input grad"] = error(x.grad, piece(x_plain.grad, -1) if parallel else x_plain.grad)
                    compare_parameters(found, name, layer, reference)
    return found


def sequence_cases(dtype: torch.dtype) -> dict[str, float]:
    """A column and a row layer with the sequence split outside of them, in each dimension."""
    found: dict[str, float] = {}
    for dim, shape in ((0, (8, 2)), (1, (2, 8)), (-2, (3, 8)), (None, (4, 2, 3))):
        for bias in (True, False):
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
        gathered = column(dtype, True, gather_output=True, sequence_parallel_enabled=True, sequence_dimension=dim)
        alone = row(dtype, False, input_is_parallel=True, reduce_output=False, **options)
        parts, whole_y = alone(piece(random(*shape, OUT, dtype=dtype), -1)), plain(dtype, False, OUT, IN)
        expected = whole_y(random(*shape, OUT, dtype=dtype))
        summed = mappings.reduce_from_tensor_model_parallel_region(parts)
        found[f"sequence dim={dim} partial"] = (
            error(summed, expected) if parts.shape == expected.shape else float("inf")
        )
        found[f"sequence dim={dim} gathered"] = error(gathered(piece(whole, at)), plain(dtype, True)(whole))
    return found


def plan_cases(dtype: torch.dtype) -> dict[str, float]:
    """Padded, strided and head-wise axes; a padded pair computes what the plain pair does, forward and backward."""
    found: dict[str, float] = {}
    degree = current_context().tp.degree
    plans = {
        "padded": AxisPlan.padded(10),
        "heads": AxisPlan.heads(5, 2),
        "strided": AxisPlan.strided(24, 3),
        "sections": AxisPlan.sections([AxisPlan.heads(3, 2), AxisPlan.heads(1, 4)]),
    }
    for name, plan in plans.items():
        size = plan.size
        for gather in (True, False):
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
    layer = column(dtype, True, IN, 24, stride=3, gather_output=True)
    found["stride"] = error(layer(x), plain(dtype, True, IN, 24)(x))
    layer = column(dtype, False, IN, 10, pad=True, pad_alignment_size_per_rank=8, keep_padded_output=True)
    y = layer(x)
    found["pad shape"] = 0.0 if y.shape[-1] == 8 * degree * -(-10 // (8 * degree)) else float("inf")
    found["pad"] = error(y[..., :10], plain(dtype, False, IN, 10)(x))
    found["pad never wins"] = 0.0 if (y[..., 10:] == torch.finfo(dtype).min).all() else float("inf")
    for features in (7, 12):
        try:
            row(dtype, True, 8, 3, stride=2)(random(2, features, dtype=dtype))
            found[f"stride {features} features"] = float("inf")
        except ShardingError:
            found[f"stride {features} features"] = 0.0
    kept = column(torch.bfloat16, True, keep_master_weight=True)
    found["master"] = (
        0.0 if torch.equal(own_part(kept, "weight", kept.master_weight).bfloat16(), kept.weight) else float("inf")
    )
    found |= master_biases()
    return found


def master_biases() -> dict[str, float]:
    """The whole initial bias in float32, of every layer that keeps its weight; None without a bias, or unasked."""
    narrow = {"dtype": torch.bfloat16, "keep_master_weight": True}
    column, row = ColumnParallelLinear(8, 16, gather_output=False, **narrow), RowParallelLinear(16, 8, **narrow)
    qkv = GQAQKVColumnParallelLinear(8, [16, 8], **narrow)
    conv = OutputChannelParallelConv2d(8, 16, 1, **narrow)
    found = {}
    for name, layer, size in (("column", column, 16), ("row", row, 8), ("conv", conv, 16)):
        master = layer.master_bias
        good = master.shape == (size,) and master.dtype == torch.float32
        good = good and torch.equal(own_part(layer, "bias", master).bfloat16(), layer.bias)
        found[f"master bias {name}"] = 0.0 if good else float("inf")
    found["master bias qkv"] = 0.0 if qkv.master_bias.shape == (32,) else float("inf")
    without = ColumnParallelLinear(8, 16, bias=False, keep_master_weight=True), ColumnParallelLinear(8, 16)
    found["no master bias"] = 0.0 if all(layer.master_bias is None for layer in without) else float("inf")
    return found


def all_cases(dtype: torch.dtype) -> list[str]:
    found = column_cases(dtype) | row_cases(dtype) | sequence_cases(dtype) | plan_cases(dtype)
    assert len(found) > 200
    return failures(found, LIMITS[dtype])


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equal_to_plain(tp: int, dtype: torch.dtype):
    for rank, bad in enumerate(run_ranks(all_cases, tp, dtype) if tp > 1 else [all_cases(dtype)]):
        assert not bad, f"rank {rank}: " + "; ".join(bad)


def test_equal_to_plain_over_shared_memory():
    """The same over the transport of rank processes on one host."""
    for rank, bad in enumerate(run_ranks(all_cases, 2, torch.float32, collectives="shm")):
        assert not bad, f"rank {rank}: " + "; ".join(bad)
