"""A state that shares memory with another tensor is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nxd_infer.errors import (
    TraceConfigError,
)
from nxd_infer.trace.buckets import list_buckets
from nxd_infer.trace.ranks import one_rank
from nxd_infer.trace.request import TraceRequest
from tests.support.graph.exporting import loaded, lowered


class Shows(nn.Module):
    """Changes ``cache`` and reads it through ``shown``, a part of it that is kept as buffer, attribute or state."""

    def __init__(self, how: str, start: int):
        super().__init__()
        memory = torch.zeros(6)
        self.register_buffer("cache", memory[:4])
        if how == "attribute":
            self.shown = memory[start:]
        else:
            self.register_buffer("shown", memory[start:])

    def forward(self, x: Tensor) -> Tensor:
        self.cache.add_(x.sum())
        return self.shown + 1


@pytest.mark.parametrize("how", ["attribute", "buffer", "state"])
def test_a_state_that_shares_memory_is_refused_and_neighbours_in_one_memory_are_not(how, tmp_path):
    states = ["cache", "shown"] if how == "state" else []
    with pytest.raises(TraceConfigError, match="'cache' shares memory with 'shown'"):
        lowered(Shows(how, 3), torch.ones(3), states=states)
    module = Shows(how, 4)
    entry, _ = lowered(module, torch.ones(3), states=states)
    run, at, _ = loaded(module, entry, tmp_path)
    assert torch.equal(run([torch.ones(3)])[0], torch.ones(2))
    assert torch.equal(at["cache"], torch.full((4,), 3.0))


def test_sharing_is_seen_before_tensors_are_stored_contiguously():
    """A view of other strides gets memory of its own on the way; that must not hide that it was one."""

    def func() -> nn.Module:
        module = Shows("buffer", 3)
        memory = torch.zeros(4, 4)
        module.register_buffer("cache", memory)
        module.register_buffer("shown", memory[:, 0])
        return module

    request = TraceRequest(func, list_buckets(torch.ones(3), None, None), 1, "eager", {})
    built = one_rank.build(request, one_rank.require_values)
    with pytest.raises(TraceConfigError, match="'cache' shares memory with 'shown'"):
        one_rank.trace_buckets(request, built, None)
