"""Sizes that no layer has, and what a compiled layer does not do."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from nxd_infer.comm import register_collectives, unregister_collectives
from nxd_infer.context import make_context, use_context
from nxd_infer.errors import CollectiveError, ParallelConfigError
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_infer.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_infer.parallel_layers.pad import pad_model


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ColumnParallelLinear(cast(Any, 4.0), 4), "whole numbers, got 4.0"),
        (lambda: RowParallelLinear(4, cast(Any, "4")), "whole numbers, got '4'"),
        (lambda: ParallelEmbedding(cast(Any, 4.0), 4), "whole numbers, got 4.0"),
        (lambda: ParallelEmbedding(0, 4), "num_embeddings must be at least 1, got 0"),
        (lambda: GQAQKVColumnParallelLinear(8, [8, 4], head_dim=0), "head_dim must be a whole number of at least 1"),
        (lambda: pad_model(nn.Linear(4, 4), 2, cast(Any, 2.5)), "number of heads must be a whole number .* got 2.5"),
        (lambda: pad_model(nn.Linear(4, 4), 2, cast(Any, "3")), "number of heads must be a whole number .* got '3'"),
    ],
)
def test_sizes_that_are_none(make, told):
    with pytest.raises(ParallelConfigError, match=told):
        make()


class Mirror:
    """The transport of two ranks that hold the same."""

    def all_reduce(self, x: torch.Tensor, axis: str, op: str = "sum") -> torch.Tensor:
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
