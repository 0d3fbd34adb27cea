"""The passes for devices, on every model family: exact, and the same program on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxd_infer import comm
from nxd_infer.backends.cpu.lower import lower
from nxd_infer.context import make_context, use_context
from nxd_infer.errors import TraceError
from nxd_infer.graph.canonical import trace_graph
from nxd_infer.graph.devices import constants_on, plain_operators, rank_as_input
from nxd_infer.graph.export import Step
from nxd_infer.graph.functional import functional, in_place
from nxd_infer.graph.ir import FUNCTIONAL, graph_to_ir, ir_to_graph
from nxd_infer.graph.passes import output_of, placeholders
from nxd_infer.graph.split import Split, split_at
from nxd_infer.graph.stored import ir_text
from nxd_infer.ops import HOST
from tests.support.backends.canonical import Rank, in_lockstep, program, ranks_of, run_whole, same, steps_of
from tests.support.needs import needs_native
from tests.support.tiny_models import CLASSIFIERS, DECODERS, ENCODERS

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    **{f"{family} tp {degree}": (family, degree, {}) for family in DECODERS for degree in (1, 2)},
    **{f"{family} tp 2": (family, 2, {}) for family in (*ENCODERS, *CLASSIFIERS)},
    "llama tp 4, one head for two ranks": ("llama", 4, {}),
    "llama tp 2, adapters": ("llama", 2, {"lora_slots": 2, "lora_rank": 2}),
    "llama tp 2, guesses": ("llama", 2, {"speculate": 2, "bucket": 2}),
    "llama tp 2, a prompt": ("llama", 2, {"bucket": 2}),
}


@pytest.fixture(scope="module", params=CASES)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    family, degree, options = CASES[request.param]
    return ranks_of(family, degree, tmp_path_factory.getbasetemp() / "canonical", **options)


@pytest.fixture(scope="module")
def plain(ranks: list[Rank]) -> list[torch.fx.GraphModule]:
    """Each rank's graph in PyTorch's own operators, a pass that takes its time."""
    before = ir_text(ranks[0].graph.ir())
    found = [plain_operators(rank.graph.module) for rank in ranks]
    assert ir_text(ranks[0].graph.ir()) == before, "a pass leaves what it is given alone"
    return found


def equal(found: list[list[list[Tensor]]], wanted: list[list[list[Tensor]]]) -> bool:
    return all(same(a, b) for one, other in zip(found, wanted, strict=True) for a, b in zip(one, other, strict=True))


def split_of(rank: Rank) -> Split:
    return split_at(rank.graph.module, len(rank.states), len(rank.inputs), HOST)


def test_nothing_writes_to_what_is_given(ranks: list[Rank]) -> None:
    before = [[tensor.clone() for tensor in (*rank.states, *rank.weights)] for rank in ranks]
    results = run_whole(ranks)
    for rank, kept in zip(ranks, before, strict=True):
        assert same([*rank.states, *rank.weights], kept)
    if ranks[0].states:
        after = results[0][-1][-len(ranks[0].states) :]
        assert any(not same([a], [b]) for a, b in zip(ranks[0].states, after, strict=True))


def test_a_graph_in_place_and_back_is_the_same(ranks: list[Rank]) -> None:
    module, states = ranks[0].graph.module, len(ranks[0].states)
    there = in_place(module, states)
    assert len(output_of(there.graph).args[0]) == len(ranks[0].graph.file.outputs)
    assert ir_text(graph_to_ir(functional(there, states), FUNCTIONAL)) == ir_text(ranks[0].graph.ir())


def test_host_and_device_put_together_are_the_whole(ranks: list[Rank]) -> None:
    def run(number: int) -> list[list[Tensor]]:
        rank, states = ranks[number], list(ranks[number].states)
        split = split_of(rank)
        programs = {id(part): program(part.module) for part in (split.head, split.body, split.tail)}
        results = []
        for inputs in steps_of(rank):
            results.append(split.run([*states, *inputs, *rank.weights], lambda part, got: programs[id(part)](*got)))
            states = results[-1][len(rank.graph.file.outputs) :]
        return results

    assert equal(in_lockstep(len(ranks), run), run_whole(ranks))


def test_the_device_has_the_weights_and_the_host_the_sampler(ranks: list[Rank]) -> None:
    rank = ranks[0]
    split = split_of(rank)
    names = [*(spec.name for spec in rank.graph.file.states), *(spec.name for spec in rank.graph.file.inputs)]
    weights = set(split.given[len(names) :])
    assert weights <= set(split.body.takes) and weights.isdisjoint([*split.head.takes, *split.tail.takes])
    states = split.given[: len(rank.states)]
    hosted = {states[place] for place in split.host_states}
    assert hosted.isdisjoint(split.body.takes)
    assert (set(states) - hosted).isdisjoint([*split.head.takes, *split.tail.takes])
    targets = {part: {node.target for node in getattr(split, part).module.graph.nodes} for part in PARTS}
    assert targets["body"].isdisjoint(HOST)
    if any(node.target in HOST for node in rank.graph.module.graph.nodes):
        assert {names[place] for place in split.host_states} == {"token_counts", "prompt_seen", "last_token"}
        assert targets["tail"] & HOST
        assert len(split.head.module.graph.nodes) < 25 < len(split.body.module.graph.nodes)
    else:
        assert split.head.gives == split.tail.gives == split.host_states == []


PARTS = ("head", "body", "tail")


def test_a_rank_is_an_input_and_the_programs_are_equal(ranks: list[Rank]) -> None:
    made = [rank_as_input(rank.graph.module) for rank in ranks]
    texts = {ir_text(graph_to_ir(module, FUNCTIONAL)) for module, _ in made}
    assert len(texts) == 1
    assert not any(name in text for text in texts for name in ("nxd.axis_rank", "nxd.shard"))
    axes = made[0][1]

    def run(number: int) -> list[list[Tensor]]:
        rank, states = ranks[number], list(ranks[number].states)
        whole, results = program(made[0][0]), []  # rank 0's, for all
        for inputs in steps_of(rank):
            results.append(whole(*[torch.tensor([number])] * len(axes), *states, *inputs, *rank.weights))
            states = results[-1][len(rank.graph.file.outputs) :]
        return results

    assert equal(in_lockstep(len(ranks), run), run_whole(ranks))
    if len(ranks) > 1 and any("axis_rank" in node[0] for node in ranks[0].graph.ir()["nodes"]):
        assert axes == ["tp"]
        place = placeholders(made[0][0].graph)[0].meta["val"]
        assert list(place.shape) == [1], "a number would be written into the program"


def test_constants_are_on_the_device_and_there_is_no_index(ranks: list[Rank]) -> None:
    rank = ranks[0]
    plain = plain_operators(rank_as_input(rank.graph.module)[0])
    text = ir_text(graph_to_ir(constants_on(plain, "xla"), FUNCTIONAL))
    devices = {entry.split('"')[0] for entry in text.split('{"device":"')[1:]}
    assert devices <= {"xla"}
    if rank.states:
        assert devices == {"xla"}
    # On a device without values every operator that is given a tensor of the host refuses it.
    moved = constants_on(plain, "meta")
    given = [torch.zeros(1, dtype=torch.int64)] * (len(placeholders(plain.graph)) - len(rank_values(rank)))
    with use_context(make_context(len(ranks), 0, tp=len(ranks), collectives="none")):
        results = program(moved)(*(value.to("meta") for value in [*given, *rank_values(rank)]))
    assert {value.device.type for value in results} == {"meta"}
    with pytest.raises(TraceError, match="leave its index out"):
        constants_on(plain, "xla:0")


def rank_values(rank: Rank) -> list[Tensor]:
    return [*rank.states, *rank.inputs, *rank.weights]


def test_plain_operators_compute_the_same_and_are_pytorchs(
    ranks: list[Rank], plain: list[torch.fx.GraphModule]
) -> None:
    collectives = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "shard", "axis_rank"}
    for name, *_ in graph_to_ir(plain[0], FUNCTIONAL)["nodes"]:
        assert not name.startswith("nxd") or name.split(".")[1] in collectives
    kept = plain_operators(ranks[0].graph.module, HOST)
    wanted = {node.target for node in ranks[0].graph.module.graph.nodes} & HOST
    assert {node.target for node in kept.graph.nodes} & HOST == wanted

    def run(number: int) -> list[list[Tensor]]:
        rank, states = ranks[number], list(ranks[number].states)
        whole, results = program(plain[number]), []
        for inputs in steps_of(rank):
            results.append(whole(*states, *inputs, *rank.weights))
            states = results[-1][len(rank.graph.file.outputs) :]
        return results

    assert equal(in_lockstep(len(ranks), run), run_whole(ranks))


@pytest.mark.usefixtures("plain")  # which has looked at that pass
def test_passes_leave_what_they_are_given_alone(ranks: list[Rank]) -> None:
    rank = ranks[0]
    before = ir_text(rank.graph.ir())
    split_of(rank)
    rank_as_input(rank.graph.module)
    constants_on(rank.graph.module, "xla")
    in_place(rank.graph.module, len(rank.states))
    lower([rank.graph], {}, None)
    assert ir_text(rank.graph.ir()) == before
    assert ir_text(graph_to_ir(ir_to_graph(json.loads(before)), FUNCTIONAL)) == before


# --- what no model of ours does -----------------------------------------------------------------------


class Own(nn.Module):
    """Asks for its piece of a tensor, and for its rank."""

    def __init__(self, context: Any, dim: int):
        super().__init__()
        self.context, self.dim = context, dim
        self.weight = nn.Parameter(torch.arange(24, dtype=torch.float32).view(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        mine = comm.shard(x * self.weight, self.context, dim=self.dim)
        return comm.all_reduce(mine.sum() + comm.axis_rank(self.context), self.context) + mine


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
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
    return rank, split_of(rank)


def _in_order(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    before = m.seen.sum(1)
    scores = (x + before[:, None]) @ m.weight + m.other
    m.other.add_(1)
    drawn = draw(scores)
    m.seen.copy_(drawn)
    return drawn, m.seen * 2, x + 1, m.other[0]


def test_a_state_that_is_read_before_and_written_after_is_the_hosts() -> None:
    rank, split = split_module(_in_order)
    names = [spec.name for spec in rank.graph.file.states]
    assert [names[place] for place in split.host_states] == ["seen"]
    values = [*rank.states, *rank.inputs, *rank.weights]
    programs = {id(part): program(part.module) for part in (split.head, split.body, split.tail)}
    found = split.run(values, lambda part, got: programs[id(part)](*(value.clone() for value in got)))
    assert same(found, program(rank.graph.module)(*values))


def _both_sides(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    m.seen.copy_(draw(x @ m.weight))
    return (m.seen @ m.weight,)


def _changed_later(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    scores = x @ m.weight
    drawn = draw(scores)
    scores.add_(1)
    return drawn, scores


@pytest.mark.parametrize(("how", "said"), [(_changed_later, "make a copy of it first")])
def test_what_cannot_be_in_two_places_is_refused(how: Any, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        split_module(how)


def test_what_follows_the_host_stays_on_the_host() -> None:
    """A product after the sampler runs on the host, including its weight: nothing returns to the device."""
    rank, split = split_module(_both_sides)
    values = [*rank.states, *rank.inputs, *rank.weights]
    programs = {id(part): program(part.module) for part in (split.head, split.body, split.tail)}
    found = split.run(values, lambda part, got: programs[id(part)](*(value.clone() for value in got)))
    assert same(found, program(rank.graph.module)(*values))
    assert split.given[-1] in split.tail.takes


@needs_native
def test_a_graph_of_native_operators_is_refused() -> None:
    from nxd_infer import native
    from nxd_infer.graph import passes

    with use_context(make_context(2, 0, tp=2, collectives="none")) as _:
        rank = Rank(Own(make_context(2, 0, tp=2, collectives="none"), 0), (torch.ones(4, 6),), (), 0)
    module = passes.copied(rank.graph.module)
    passes.insert_operators(module, native.load(), {})
    with pytest.raises(TraceError, match="a native operator"):
        plain_operators(module)


def test_every_family_is_among_the_cases(tmp_path: Path) -> None:
    from tests.support.tiny_models import FAMILIES

    assert {family for family, _, _ in CASES.values()} == set(FAMILIES)
