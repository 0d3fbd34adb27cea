"""What surrounds the computation on real ranks: low precision, initial values, groups, the mappings."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nxd_infer import parallel_state
from nxd_infer.context import current_context, make_context, use_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.parallel_layers import mappings
from nxd_infer.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_infer.parallel_layers.mappings import axis_of
from tests.support.parallel_layers.compare import LIMITS, error, piece
from tests.support.ranks import run_ranks


def low_precision(size: int) -> dict[str, float]:
    torch.manual_seed(0)
    row = RowParallelLinear(size, 8, dtype=torch.bfloat16)
    torch.manual_seed(0)
    reference = nn.Linear(size, 8, dtype=torch.bfloat16)
    x = torch.randn(64, size, dtype=torch.bfloat16)
    found = {"row": error(row(x), reference(x))}
    for gather in (True, False):
        torch.manual_seed(0)
        column = ColumnParallelLinear(size, 8, gather_output=gather, dtype=torch.bfloat16)
        found[f"column {gather}"] = error(column(x), reference(x) if gather else piece(reference(x), -1))
    torch.manual_seed(0)
    full = RowParallelLinear(size, 8)
    full.load_state_dict({name: value.float() for name, value in row.state_dict().items()})
    with torch.autocast("cpu", torch.bfloat16):
        found["autocast"] = error(full(x.float()), reference(x))
    x.requires_grad_()
    (row(x) * 2).sum().backward()
    ours, x.grad = x.grad, None
    (reference(x) * 2).sum().backward()
    found["input grad"] = error(ours, x.grad)
    return found


def initialised() -> tuple[torch.Tensor, torch.Tensor]:
    """The caller's generator stands at the same place afterwards on every rank and at every degree."""
    torch.manual_seed(1)
    ColumnParallelLinear(4, 8)
    ParallelEmbedding(8, 4, padding_idx=2)
    row = RowParallelLinear(8, 4)
    assert row.bias is not None
    return torch.rand(3), row.bias.detach()


def groups() -> list[str]:
    group = parallel_state.get_tensor_model_parallel_group()
    x = torch.ones(2) * (current_context().tp.rank + 1)
    assert mappings.reduce_from_tensor_model_parallel_region(x, group).tolist() == [3.0, 3.0]
    layers = [
        ColumnParallelLinear(4, 6, tensor_model_parallel_group=group),
        RowParallelLinear(4, 6, tensor_model_parallel_group="cp"),
    ]
    for axis, every in (
        ("tp", parallel_state.get_tensor_model_parallel_group(as_list=True)),
        ("cp", parallel_state.get_context_parallel_group(as_list=True)),
    ):
        own = next(ranks for ranks in every if current_context().rank in ranks)
        assert axis_of(every, current_context()) == axis_of(own, current_context()) == axis
    try:
        ColumnParallelLinear(4, 6, tensor_model_parallel_group=dist.new_group([0, 1, 2]))
    except ParallelConfigError as problem:
        message = str(problem)
    return [layer.axis for layer in layers] + [str(layer.degree) for layer in layers] + [message]


def test_groups():
    found = run_ranks(groups, 4, tp=2, cp=2)
    assert all(axes[:4] == ["tp", "cp", "2", "2"] for axes in found)
    assert "ranks [0, 1, 2] is not a parallel group of rank 0" in found[0][4]
    for wrong in ("sp", 3, [[0, 1]]):
        with pytest.raises(ParallelConfigError):
            ColumnParallelLinear(4, 6, tensor_model_parallel_group=wrong)


def mapping_cases() -> dict[str, float]:
    """Every mapping, forward and backward, against what its definition says."""
    tp = current_context().tp
    base = torch.arange(4 * 8 * 4, dtype=torch.float64).view(4, 8, 4) / 10
    mine = base * (tp.rank + 1)
    total = base * sum(range(1, tp.degree + 1))
    stacked = [base * (rank + 1) for rank in range(tp.degree)]
    found: dict[str, float] = {}

    def check(name: str, move, x, expected, grad, expected_grad) -> None:
        x = x.clone().requires_grad_()
        y = move(x)
        y.backward(grad)
        found[name] = max(error(y, expected), error(x.grad, expected_grad))

    check("copy", mappings.copy_to_tensor_model_parallel_region, base, base, mine, total)
    check("reduce", mappings.reduce_from_tensor_model_parallel_region, mine, total, base, base)
    scatter = mappings.scatter_to_tensor_model_parallel_region
    gather = mappings.gather_from_tensor_model_parallel_region
    pieces = torch.cat([piece_of(s, r, -1) for r, s in enumerate(stacked)], -1)
    check("scatter", scatter, base, piece(base, -1), piece(mine, -1), pieces)
    check("gather", gather, mine, torch.cat(stacked, -1), torch.cat(stacked, -1), mine)
    for dim in (0, 1, -1):
        pieces = torch.cat([piece_of(s, r, dim) for r, s in enumerate(stacked)], dim)
        whole, reduced = torch.cat(stacked, dim), piece(total, dim)
        move = partial(mappings.scatter_to_sequence_parallel_region, sequence_dimension=dim)
        check(f"sequence scatter {dim}", move, base, piece(base, dim), piece(mine, dim), pieces)
        factor = sum(range(1, tp.degree + 1))
        move = partial(mappings.gather_from_sequence_parallel_region, sequence_dimension=dim)
        check(f"sequence gather {dim}", move, mine, whole, whole * (tp.rank + 1), mine * factor)
        move = partial(move, to_model_parallel=False)
        check(f"sequence gather alike {dim}", move, mine, whole, whole, mine)
        move = partial(mappings.reduce_scatter_to_sequence_parallel_region, sequence_dimension=dim)
        check(f"sequence reduce-scatter {dim}", move, mine, reduced, piece(mine, dim), pieces)
        move = partial(mappings.reduce_scatter_to_tensor_model_parallel_region_with_dim, partition_dim=dim)
        check(f"reduce-scatter {dim}", move, mine, reduced, piece(mine, dim), pieces)
    image = base[:, :, None, :].contiguous()
    channels = mappings.scatter_input_channels_to_tensor_model_parallel_region(image)
    found["channels"] = error(channels, image.chunk(tp.degree, 1)[tp.rank])
    with torch.no_grad():
        found["no grad"] = error(gather(mine), torch.cat(stacked, -1))
    return found


def piece_of(x: torch.Tensor, rank: int, dim: int) -> torch.Tensor:
    return x.chunk(current_context().tp.degree, dim)[rank]


def backward_in_another_context() -> list[float]:
    """The backward runs in the groups of the forward, whatever the current context has become."""
    x = torch.ones(3, requires_grad=True)
    y = mappings.copy_to_tensor_model_parallel_region(x).sum()
    with use_context(make_context()):
        y.backward()
    return x.grad.tolist()


def on_two_ranks() -> dict[str, Any]:
    return {
        "initial": initialised(),
        "grad": backward_in_another_context(),
    }


def test_two_ranks():
    """A layer draws at every degree what a plain one draws."""
    torch.manual_seed(1)
    nn.Linear(4, 8), nn.Embedding(8, 4, padding_idx=2)
    bias = nn.Linear(8, 4).bias
    after = torch.rand(3)
    ranks = run_ranks(on_two_ranks, 2)
    for drawn, own in (initialised(), *(rank["initial"] for rank in ranks)):
        assert torch.equal(drawn, after) and torch.equal(own, bias)
    for rank in ranks:
        assert rank["grad"] == [2.0] * 3


def on_four_ranks() -> tuple[dict[str, float], dict[str, float]]:
    return mapping_cases(), low_precision(512)


def test_mappings_and_bfloat16():
    for exact, low in run_ranks(on_four_ranks, 4):
        assert len(exact) >= 16 and all(value < 1e-12 for value in exact.values()), exact
        assert all(value < LIMITS[torch.bfloat16] for value in low.values()), low
