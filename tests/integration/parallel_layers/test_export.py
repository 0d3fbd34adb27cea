"""Exported layers: rank is data, so every rank's graph is the same, and collectives are operators that name an axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from nxd_infer.comm import register_collectives, unregister_collectives
from nxd_infer.context import make_context, use_context
from nxd_infer.errors import CollectiveError
from nxd_infer.layout import AxisPlan
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_infer.parallel_layers.layers import (
    ColumnParallelLinear,
    InputChannelParallelConv2d,
    OutputChannelParallelConv2d,
    ParallelEmbedding,
    RowParallelLinear,
    SPMDRank,
)
from tests.support.parallel_layers.compare import error
from tests.support.ranks import run_ranks

IDS = torch.tensor([[0, 7, 3, 9], [11, 2, 5, 6]])


class ShiftedByRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rank_util = SPMDRank(2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rank_util.get_rank()


def floats(*shape: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*shape)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "embedding": (lambda: ParallelEmbedding(12, 8, padding_idx=7, max_norm=2.0), lambda: IDS),
    "embedding-across": (lambda: ParallelEmbedding(12, 8, shard_across_embedding=True, max_norm=2.0), lambda: IDS),
    "column": (lambda: ColumnParallelLinear(8, 6), lambda: floats(2, 3, 8)),
    "column-heads": (lambda: ColumnParallelLinear(8, 10, output_plan=AxisPlan.heads(5, 2)), lambda: floats(2, 3, 8)),
    "row": (lambda: RowParallelLinear(8, 6), lambda: floats(2, 3, 8)),
    "row-strided": (lambda: RowParallelLinear(12, 6, input_plan=AxisPlan.strided(12, 3)), lambda: floats(2, 3, 12)),
    "row-sequence": (
        lambda: RowParallelLinear(8, 6, input_is_parallel=True, sequence_parallel_enabled=True),
        lambda: floats(4, 3, 4),
    ),
    "qkv": (
        lambda: GQAQKVColumnParallelLinear(8, [8, 4], head_dim=2, kv_size_multiplier=2),
        lambda: floats(2, 3, 8),
    ),
    "conv-out": (lambda: OutputChannelParallelConv2d(4, 6, 3), lambda: floats(1, 4, 5, 5)),
    "conv-in": (lambda: InputChannelParallelConv2d(4, 6, 3), lambda: floats(1, 4, 5, 5)),
    "rank": (ShiftedByRank, lambda: floats(2, 3)),
}


def exported() -> dict[str, tuple[str, float]]:
    """Each layer's graph on this rank, and what it computes on the transport beside what the layer gives eagerly."""
    found = {}
    for name, (make, inputs) in CASES.items():
        torch.manual_seed(3)
        layer = make()
        with torch.set_grad_enabled(name in ("row", "column", "embedding")):
            program = torch.export.export(layer, (inputs(),))
        code = program.graph_module.code + str(program.graph_signature)
        with torch.no_grad():
            result, expected = program.module()(inputs()), layer(inputs())
        results = zip(result, expected, strict=True) if isinstance(result, tuple) else [(result, expected)]
        found[name] = code, max(error(a, b) for a, b in results)
    return found


def test_graphs_of_all_ranks_are_equal_and_compute_the_same():
    first, second = run_ranks(exported, 2)
    for name in CASES:
        (code, wrong), (of_other, also_wrong) = first[name], second[name]
        assert code == of_other, name
        assert "torch.ops.nxd." in code and "'tp'" in code, name
        assert max(wrong, also_wrong) < 1e-6, name


def test_degree_one_records_no_collective():
    program = torch.export.export(ColumnParallelLinear(8, 6), (floats(2, 8),))
    assert "nxd." not in program.graph_module.code


def reduced_in(layer: nn.Module, x: Tensor) -> list[torch.dtype]:
    """The types in which an exported layer's collectives sum."""
    graph = torch.export.export(layer, (x,)).graph
    sums = [node for node in graph.nodes if "reduce" in str(node.target)]
    return [node.args[0].meta["val"].dtype for node in sums]


@pytest.mark.parametrize(
    ("dtype", "options", "wanted"),
    [
        (torch.bfloat16, {}, torch.float32),
        (torch.float16, {"sequence_parallel_enabled": True}, torch.float32),
        (torch.bfloat16, {"reduce_dtype": None}, torch.bfloat16),
        (torch.bfloat16, {"reduce_dtype": torch.bfloat16, "sequence_parallel_enabled": True}, torch.bfloat16),
        (torch.float64, {}, torch.float64),
    ],
)
def test_sums_are_taken_in_reduce_dtype(dtype: torch.dtype, options: dict, wanted: torch.dtype):
    """float32 by default for low precision, never less than the values have, and what is asked for otherwise."""
    with use_context(make_context(2, 0, tp=2)):
        layer = RowParallelLinear(8, 4, dtype=dtype, input_is_parallel=True, **options)
        assert reduced_in(layer, torch.ones(2, 4, dtype=dtype)) == [wanted]


class Mirror:
    """The transport of two ranks that hold the same."""

    def all_reduce(self, x: Tensor, axis: str, op: str = "sum") -> Tensor:
        return x * 2

    def close(self) -> None: ...


def test_a_compiled_layer_has_no_graph_break_and_keeps_to_its_degree():
    register_collectives("mirror", cast(Any, Mirror()))
    try:
        with use_context(make_context(2, tp=2, collectives="mirror")):
            layer = ParallelEmbedding(8, 6)
            compiled = torch.compile(layer, backend="eager", fullgraph=True)
            ids = torch.tensor([1, 7])
            assert torch.equal(compiled(ids), layer(ids))
        with (
            use_context(make_context(4, tp=4, collectives="mirror")),
            pytest.raises(CollectiveError, match="compiled at degree 2 of axis 'tp' is called at degree 4"),
        ):
            compiled(ids)
    finally:
        unregister_collectives("mirror")
