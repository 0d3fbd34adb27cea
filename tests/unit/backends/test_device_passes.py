"""The passes for devices on small graphs that no model of ours has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxd_infer import comm
from nxd_infer.context import make_context, use_context
from nxd_infer.errors import TraceError
from nxd_infer.graph.canonical import trace_graph
from nxd_infer.graph.devices import rank_as_input
from nxd_infer.graph.export import Step
from nxd_infer.graph.split import Split, split_at
from nxd_infer.ops import HOST
from tests.support.backends.canonical import Rank, in_lockstep, program, run_parts, same


class Own(nn.Module):
    """Asks for its piece of a tensor, and for its rank."""

    def __init__(self, context: Any, dim: int):
        super().__init__()
        self.context, self.dim = context, dim
        self.weight = nn.Parameter(torch.arange(24, dtype=torch.float32).view(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        mine = comm.shard(x * self.weight, self.context, dim=self.dim)
        return comm.all_reduce(mine.sum() + comm.axis_rank(self.context), self.context) + mine


@pytest.mark.parametrize("dim", [0, -1])
def test_a_piece_of_a_tensor_is_picked_by_the_rank(dim: int) -> None:
    degree, x = 2, torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    ranks = []
    for rank in range(degree):
        context = make_context(degree, rank, tp=degree, collectives="none")
        with use_context(context):
            ranks.append(Rank(Own(context, dim), (x,), (), rank))
    made, axes = rank_as_input(ranks[0].graph.module)
    assert axes == ["tp"]

    def run(number: int) -> tuple[list[Tensor], list[Tensor]]:
        values = [x, ranks[number].weights[0]]
        return program(ranks[number].graph.module)(*values), program(made)(torch.tensor([number]), *values)

    results = in_lockstep(degree, run)
    assert all(same(found, wanted) for wanted, found in results)
    assert not same(results[0][0], results[1][0])


class Chosen(nn.Module):
    """A branch that asks for its rank."""

    def __init__(self, context: Any):
        super().__init__()
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: y + comm.axis_rank(self.context), lambda y: y + 1.0, (x,))


def test_a_branch_that_asks_for_its_rank_is_refused() -> None:
    context = make_context(2, 0, tp=2, collectives="none")
    with use_context(context):
        graph = trace_graph(Step(Chosen(context).eval(), {"x": torch.ones(3)}))
    with pytest.raises(TraceError, match=r"a branch of torch\.cond asks for its rank"):
        rank_as_input(graph.module)


class Drawn(nn.Module):
    """Rows drawn by ``how``, a state that counts, a weight."""

    def __init__(self, how: Any):
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.randn(5, 5, generator=torch.Generator().manual_seed(0)))
        self.register_buffer("seen", torch.zeros(2, 5))
        self.register_buffer("other", torch.ones(2, 5))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.how(self, x)


def draw(logits: Tensor) -> Tensor:
    """One of the operators that stay on the host."""
    counts = torch.zeros(2, 5, dtype=torch.int32)
    seen = torch.zeros(2, 5, dtype=torch.bool)
    tokens, zeros = torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    torch.ops.nxd.remember_tokens(counts, seen, tokens, tokens == 0, zeros, zeros + 1, torch.arange(2))
    return logits + counts


def split_module(how: Any) -> tuple[Rank, Split]:
    rank = Rank(Drawn(how).eval(), (torch.randn(2, 5),), ("seen", "other"), 0)
    return rank, split_at(rank.graph.module, len(rank.states), len(rank.inputs), HOST)


def _in_order(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    before = m.seen.sum(1)
    scores = (x + before[:, None]) @ m.weight + m.other
    m.other.add_(1)
    drawn = draw(scores)
    m.seen.copy_(drawn)
    return drawn, m.seen * 2, x + 1, m.other[0]


def _both_sides(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    m.seen.copy_(draw(x @ m.weight))
    return (m.seen @ m.weight,)


def _changed_later(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    scores = x @ m.weight
    drawn = draw(scores)
    scores.add_(1)
    return drawn, scores


def check_parts(how: Any) -> tuple[Rank, Split]:
    rank, split = split_module(how)
    values = [*rank.states, *rank.inputs, *rank.weights]
    assert same(run_parts(split)(values), program(rank.graph.module)(*values))
    return rank, split


def test_a_state_that_is_read_before_and_written_after_is_the_hosts() -> None:
    rank, split = check_parts(_in_order)
    names = [spec.name for spec in rank.graph.file.states]
    assert [names[place] for place in split.host_states] == ["seen"]


def test_what_follows_the_host_stays_on_the_host() -> None:
    """A product after the sampler runs on the host, including its weight: nothing returns to the device."""
    _, split = check_parts(_both_sides)
    assert split.given[-1] in split.tail.takes


def test_what_cannot_be_in_two_places_is_refused() -> None:
    with pytest.raises(TraceError, match="make a copy of it first"):
        split_module(_changed_later)
