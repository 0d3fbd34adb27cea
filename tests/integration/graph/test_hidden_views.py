"""Writes through views that no operator's schema declares, and into tensors that forward itself makes. Eager, in this
process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nxd_infer.graph.passes import mutated_placeholders
from tests.support.graph.exporting import loaded, lowered


def test_a_tensor_that_forward_makes_of_numbers_may_be_changed_there(tmp_path):
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            values = torch.tensor([1.0, 2.0, 3.0])
            values[0] = x[0]
            values[1:].mul_(2)
            return values + x, torch.tensor([4.0, 5.0, 6.0]) * x

    entry, step = lowered(Writes(), torch.ones(3))
    assert not step.states
    run, _, _ = loaded(Writes(), entry, tmp_path)
    for value in (7.0, 8.0):  # the second call begins with the same numbers again
        changed, kept = run([torch.full((3,), value)])
        assert torch.equal(changed, torch.tensor([2 * value, 4 + value, 6 + value]))
        assert torch.equal(kept, torch.tensor([4.0, 5.0, 6.0]) * value)


class Hides(nn.Module):
    """Writes to ``count``, or to the input, through an operator whose schema does not say that it returns a view."""

    def __init__(self, view: Callable[[Tensor], Tensor], of_state: bool):
        super().__init__()
        self.view, self.of_state = view, of_state
        self.register_buffer("count", torch.zeros(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.view(self.count if self.of_state else x).add_(1)
        return x + self.count


VIEWS = {
    "type_as": lambda x: x.type_as(x * 2),
    "einsum": lambda x: torch.einsum("ij->ji", x),
    "atleast_3d": torch.atleast_3d,
    "meshgrid": lambda x: torch.meshgrid(x[0], torch.ones(1), indexing="ij")[0],
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, torch.ones(1))[0],
    "feature_dropout": lambda x: nn.functional.dropout1d(x, training=False),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_write_through_a_view_that_no_schema_declares_is_found(view, tmp_path):
    module = Hides(VIEWS[view], of_state=True)
    entry, step = lowered(module, torch.ones(1, 3))
    assert step.states == ["count"] and not entry.graph.weights
    assert not mutated_placeholders(entry.canonical.module.graph)
    run, states, _ = loaded(module, entry, tmp_path)
    assert torch.equal(run([torch.ones(1, 3)])[0], torch.full((1, 3), 2.0))
    assert torch.equal(run([torch.ones(1, 3)])[0], torch.full((1, 3), 3.0))
    assert torch.equal(states["count"], torch.full((1, 3), 2.0))
    entry, _ = lowered(Hides(VIEWS[view], of_state=False), torch.ones(1, 3))
    run, _, _ = loaded(module, entry, tmp_path / "input")
    x = torch.ones(1, 3)
    assert torch.equal(run([x])[0], torch.full((1, 3), 2.0))
    assert torch.equal(x, torch.ones(1, 3))
