"""Exporting states: updates, aliases, hidden views, shared memory, what changes in place and what may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from nxd_infer.errors import TraceConfigError, TraceError
from nxd_infer.graph.export import state_names
from nxd_infer.graph.passes import mutated_placeholders
from tests.support.graph.exporting import follow, loaded, lowered, operators


class Cache(nn.Module):
    """``update(cache, x, at)`` returns the cache's next value."""

    def __init__(self, update: Callable[..., Any]):
        super().__init__()
        self.update = update
        self.register_buffer("cache", torch.zeros(2, 4, 3))

    def forward(self, x: Tensor, at: Tensor) -> Any:
        return self.update(self, x, at)


CALLS = [(torch.randn(2, 1, 3) + shift, (torch.tensor([1, 2]) + shift) % 4) for shift in range(3)]


def _scatter(self: Cache, x: Tensor, at: Tensor) -> Any:
    cache = torch.scatter(self.cache, 1, at[:, None, None].expand(2, 1, 3), x)
    return cache.sum(1), cache


def _old_value_after(self: Cache, x: Tensor, at: Tensor) -> Any:
    cache = self.cache.index_put((torch.arange(2), at), x[:, 0])
    return self.cache.sum(1) + cache.sum(1), cache


def _assigned(self: Cache, x: Tensor, at: Tensor) -> Any:
    self.cache = self.cache.index_put((torch.arange(2), at), x[:, 0])
    return self.cache.sum(1)


def _in_place(self: Cache, x: Tensor, at: Tensor) -> Any:
    self.cache[torch.arange(2), at] = x[:, 0]
    return self.cache.sum(1)


@pytest.mark.parametrize(
    ("update", "declared", "operator"),
    [
        (_scatter, True, "aten.scatter_.src"),  # an output becomes a state only when that is declared
        (_old_value_after, True, "aten.copy_.default"),  # the old value is read later, and kept for that
        (_assigned, False, "aten.index_put_.default"),
        (_in_place, False, "aten.index_put_.default"),
    ],
)
def test_decision_1_and_4_a_state_keeps_its_value_and_is_updated_in_place_where_it_can(
    update, declared, operator, tmp_path
):
    entry, step = follow(
        Cache(update), tmp_path, CALLS, {1: "cache"} if declared else {}, ["cache"] if declared else []
    )
    assert step.states == ["cache"] and len(entry.graph.outputs) == 1
    writes = {"aten.index_put_.default", "aten.copy_.default", "aten.scatter.src", "aten.scatter_.src"}
    assert writes & set(operators(entry)) == {operator}


def _shifted(self: Cache, x: Tensor, at: Tensor) -> Any:
    """The new entries are a view of the old ones."""
    return x + 1, self.cache.index_copy(1, torch.arange(1, 4), self.cache[:, :3])


def _part_of_the_old_value(self: Cache, x: Tensor, at: Tensor) -> Any:
    return self.cache[:, 1:3], self.cache + x


@pytest.mark.parametrize("update", [_shifted, _part_of_the_old_value])
def test_what_reads_or_returns_the_old_value_of_a_state_gets_the_old_value(update, tmp_path):
    module = Cache(update)
    module.cache.normal_()
    follow(module, tmp_path, CALLS, {1: "cache"})


class Places(nn.Module):
    """Two states that change places, by aliases or by assignment."""

    def __init__(self, assigns: bool = True):
        super().__init__()
        self.assigns = assigns
        self.register_buffer("a", torch.ones(3))
        self.register_buffer("b", torch.zeros(3))

    def forward(self, x: Tensor) -> Any:
        old = self.a
        if self.assigns:
            self.a, self.b = self.b, self.a
            return old + x
        return self.b, self.a, old + x


class Recurrent(nn.Module):
    """Its layers list their weights anew when they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(3, 2, num_layers=2)
        self.register_buffer("h", torch.zeros(2, 2))
        self.register_buffer("c", torch.zeros(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        y, (self.h, self.c) = self.layer(x[None], (self.h, self.c))
        return y


class Changes(nn.Module):
    """A parameter, a state of which it returns a view, and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.weight += x
        self.count += x
        same = x.reshape(3, 1)
        x += 1
        return self.weight * 2, self.count[:2], same


@pytest.mark.parametrize(
    ("module", "aliases", "states"),
    [
        (Places(), {}, ["a", "b"]),
        (Places(assigns=False), {0: "a", 1: "b"}, ["a", "b"]),
        (Recurrent(), {}, ["h", "c"]),
        (Changes(), {}, ["count", "weight"]),
    ],
    ids=["swapped", "swapped by aliases", "recurrent", "changed in place"],
)
def test_decision_1_what_a_module_changes_becomes_its_states(module, aliases, states, tmp_path):
    calls = [(torch.randn(3, generator=torch.Generator().manual_seed(seed)),) for seed in range(3)]
    entry, step = follow(module, tmp_path, calls, aliases)
    assert sorted(step.states) == sorted(states)
    assert not {spec.name for spec in entry.graph.weights} & set(states)
    if isinstance(module, Recurrent):
        assert all(type(weight) is nn.Parameter for weight in module.layer._flat_weights)  # as it was before


class Keeps(nn.Module):
    """Keeps a tensor from one call to the next where no state is."""

    def __init__(self, where: str):
        super().__init__()
        self.where = where
        self.previous = None
        self.seen: list[Tensor] = []
        self.register_buffer("empty", None)
        self.sum = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        if self.where == "sum":
            self.sum += x
            y = x + self.sum
        elif self.where == "previous":
            y = x if self.previous is None else x + self.previous
            self.previous = x
        elif self.where == "seen":
            self.seen.append(x)
            y = torch.stack(self.seen).sum(0)
        else:
            y = x if self.empty is None else x + self.empty
            self.empty = x
        return y


@pytest.mark.filterwarnings("ignore")  # export warns of some of them as well
@pytest.mark.parametrize("where", ["sum", "previous", "seen", "empty"])
def test_decision_1_a_tensor_kept_outside_of_states_is_refused_by_name(where):
    with pytest.raises(TraceError, match=f"'{where}'.*register"):
        lowered(Keeps(where), torch.ones(3))


def test_a_number_that_changes_is_warned_of(caplog):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x + self.calls

    lowered(Counts(), torch.ones(3))
    assert "changes 'calls' from 0 to 1" in caplog.text


def test_one_of_two_names_of_a_tensor_cannot_be_assigned():
    class Unties(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("a", torch.ones(3))
            self.register_buffer("b", self.a)

        def forward(self, x: Tensor) -> Tensor:
            self.b = self.b + 1
            return x + self.a

    with pytest.raises(TraceError, match=r"'a', 'b'.*one tensor"):
        lowered(Unties(), torch.ones(3))


@pytest.mark.parametrize(
    ("aliases", "message"),
    [({7: "cache"}, "output 7"), ({0: "cache"}, r"is torch.float32\[2, 3\] where the state is")],
)
def test_an_alias_that_cannot_be_is_refused(aliases, message):
    with pytest.raises(TraceConfigError, match=message):
        lowered(Cache(_scatter), *CALLS[0], aliases=aliases)


def test_states_are_named_by_name_or_by_tensor_and_must_be_registered():
    module = Cache(_scatter)
    assert state_names(module, [module.cache, "cache"]) == ["cache", "cache"]
    for wrong in ("cash", torch.zeros(2), 3):
        with pytest.raises(TraceConfigError, match="not a buffer or parameter"):
            state_names(module, [wrong])


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


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "type_as": lambda x: x.type_as(x * 2),
    "einsum": lambda x: torch.einsum("ij->ji", x),
    "feature_dropout": lambda x: nn.functional.dropout1d(x, training=False),
}


class Hides(nn.Module):
    """Writes to a state, and to an input, through each operator whose schema does not say that it returns a view."""

    def __init__(self) -> None:
        super().__init__()
        for name in VIEWS:
            self.register_buffer(name, torch.zeros(1, 3))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        for x, (name, view) in zip(inputs, VIEWS.items(), strict=True):
            view(self.get_buffer(name)).add_(1)
            view(x).add_(1)
        return tuple(x + self.get_buffer(name) for x, name in zip(inputs, VIEWS, strict=True))


def test_a_write_through_a_view_that_no_schema_declares_is_found(tmp_path):
    module = Hides()
    entry, step = lowered(module, *(torch.ones(1, 3) for _ in VIEWS))
    assert sorted(step.states) == sorted(VIEWS) and not entry.graph.weights
    assert not mutated_placeholders(entry.canonical.module.graph)
    run, states, _ = loaded(module, entry, tmp_path)
    for call in (1, 2):
        inputs = [torch.ones(1, 3) for _ in VIEWS]
        for name, x, found in zip(VIEWS, inputs, run(inputs), strict=True):
            assert torch.equal(found, torch.full((1, 3), 2.0 + call)), name
            assert torch.equal(states[name], torch.full((1, 3), float(call))), name
            assert torch.equal(x, torch.ones(1, 3)), name


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


@pytest.mark.parametrize("how", ["attribute", "state"])
def test_a_state_that_shares_memory_is_refused_and_neighbours_in_one_memory_are_not(how, tmp_path):
    states = ["cache", "shown"] if how == "state" else []
    with pytest.raises(TraceConfigError, match="'cache' shares memory with 'shown'"):
        lowered(Shows(how, 3), torch.ones(3), states=states)
    module = Shows(how, 4)
    entry, _ = lowered(module, torch.ones(3), states=states)
    run, at, _ = loaded(module, entry, tmp_path)
    assert torch.equal(run([torch.ones(3)])[0], torch.ones(2))
    assert torch.equal(at["cache"], torch.full((4,), 3.0))


class MaskedState(nn.Module):
    """Changes a state, and makes a mask as transformers 4 does: lookups under vmap are a function of autograd."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, rows: Tensor) -> Tensor:
        self.seen.add_(1)
        with TransformGetItemToIndex():
            return torch.vmap(lambda row: self.seen[row])(rows) + 1


def test_a_state_beside_a_function_that_export_keeps_is_refused():
    with pytest.raises(TraceError, match="MaskedState changes a state or an input, and calls a Python function"):
        lowered(MaskedState(), torch.tensor([3, 0]), states=["seen"])
