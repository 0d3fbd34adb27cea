"""Parameter groups that are changed after the optimizer was made: refused by name, until they are sharded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nxd_infer.checkpoint.api import save_checkpoint
from nxd_infer.errors import ParallelConfigError
from nxd_infer.optimizer import NxDOptimizer

Change = Callable[[list[dict[str, Any]], nn.Parameter], object]
CHANGES: list[tuple[Change, str]] = [
    (lambda groups, more: groups[0]["params"].append(more), "group 0 has 'more' in addition"),
    (
        lambda groups, more: groups[1].update(params=[more]),
        r"group 1 has 'more' in addition; group 1 lacks 'parameter 0 of shape \(3,\)'",
    ),
    (lambda groups, more: groups.pop(), "group 1 lacks 'parameter 0"),
    (lambda groups, more: groups.append({"params": [], "lr": 1.0}), "it has 3 groups instead of 2"),
]


@pytest.mark.parametrize(("change", "said"), CHANGES, ids=["appended", "replaced", "one less", "empty"])
@pytest.mark.parametrize("zero1", [False, True], ids=["plain", "zero1"])
def test_groups_that_were_changed_are_refused(change: Change, said: str, zero1: bool, tmp_path: Path):
    """The wrapped optimizer has its own: what was appended was never stepped, and nothing said so."""
    more = nn.Parameter(torch.ones(2))
    more.nxd_name = "more"  # pyright: ignore[reportAttributeAccessIssue]
    params = [nn.Parameter(torch.ones(size)) for size in (2, 3)]
    optimizer: Any = NxDOptimizer([{"params": [p]} for p in params], torch.optim.SGD, zero1=zero1, defaults={"lr": 0.5})
    optimizer.param_groups[0]["params"] = list(reversed(optimizer.param_groups[0]["params"]))  # the order is free
    change(optimizer.param_groups, more)
    sum(p.sum() for p in (*params, more)).backward()  # pyright: ignore[reportAttributeAccessIssue]
    calls = [optimizer.step, copy.deepcopy(optimizer).step, optimizer.state_dict, optimizer.synchronize_gradients]
    for ask in (*calls, lambda: save_checkpoint(tmp_path, "a", optimizer=optimizer)):
        with pytest.raises(
            ParallelConfigError, match=f"param_groups was changed, .*{said}.* call optimizer.add_param_group"
        ):
            ask()
    assert all(torch.equal(p, torch.ones_like(p)) for p in params)


def test_groups_may_be_changed_until_they_are_sharded():
    first, more = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = NxDOptimizer([first], torch.optim.SGD, defaults={"lr": 0.5}, lazy_init=True, grad_clipping=False)
    optimizer.param_groups[0]["params"].append(more)
    optimizer.init_zero()
    (first.sum() + more.sum()).backward()
    optimizer.step()
    assert torch.equal(first, more) and first[0] == 0.5
