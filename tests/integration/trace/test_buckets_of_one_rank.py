"""What the buckets of a rank share, and how each is called. Eager, in this process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.trace import BucketModelConfig
from nxd_infer.trace.buckets import list_buckets
from nxd_infer.trace.ranks import one_rank
from nxd_infer.trace.ranks.rank_graphs import RankGraphs
from nxd_infer.trace.request import TraceRequest


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), torch.nan))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a - b * self.weight


def traced(examples: list[Any]) -> RankGraphs:
    request = TraceRequest(Weighted, list_buckets(examples, BucketModelConfig(), None), 1, "eager", {})
    (stage,) = one_rank.trace_buckets(request, one_rank.build(request, one_rank.require_values))
    return stage


def test_a_call_by_position_means_the_same_input_in_every_bucket():
    """Example inputs by name may come in any order, so that a larger bucket would take them exchanged."""
    by_name = [{"b": torch.ones(2), "a": torch.ones(2)}, {"a": torch.ones(4), "b": torch.ones(4)}]
    found = traced(by_name)
    assert [[spec.name for spec in bucket.inputs] for bucket in found.buckets] == [["b", "a"], ["b", "a"]]
    found = traced([*by_name, (torch.ones(6), torch.ones(6))])  # by position, as forward takes them
    assert [[spec.name for spec in bucket.inputs] for bucket in found.buckets] == [["a", "b"]] * 3


def test_a_weight_of_one_module_is_stored_once_whatever_its_values_are():
    found = traced([(torch.ones(2), torch.ones(2)), (torch.ones(4), torch.ones(4))])
    assert list(found.weights) == ["weight"]
