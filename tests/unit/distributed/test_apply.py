"""Hidden states that enter a parallel region."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nxd_infer.context import make_context
from nxd_infer.distributed.regions import enter_once
from nxd_infer.errors import ParallelConfigError


def test_hidden_states_enter_a_region_once_under_any_of_their_names():
    class Called(nn.Module):
        def forward(self, *args: Tensor, **named: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
            return args, named

    module, x, mask = Called(), torch.ones(1, 2, 3, requires_grad=True), torch.zeros(1, 2)
    enter_once(module, make_context(2, tp=2), False, 1)
    (first, second), named = module(x, mask)
    assert first is not x and second is mask and named == {}
    _, named = module(query=x, key=x, value=x, mask=mask)  # as DistilBERT's attention of transformers 4 is
    assert named["query"] is named["key"] is named["value"] is not x and named["mask"] is mask
    with pytest.raises(ParallelConfigError, match="called with states: its hidden states must come first, or as one"):
        module(states=x)
