"""The passes for devices on a whole decoder: exact, and the same program on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nxd_infer import native
from nxd_infer.backends.hlo.files import PARTS_FILE, TAIL_FILE, PartsFile
from nxd_infer.backends.hlo.parts import lower_graphs
from nxd_infer.errors import TraceError
from nxd_infer.graph.devices import plain_operators, rank_as_input
from nxd_infer.graph.ir import FUNCTIONAL, graph_to_ir
from nxd_infer.graph.passes import copied, insert_operators, placeholders
from nxd_infer.graph.split import split_at
from nxd_infer.graph.stored import ir_text
from nxd_infer.ops import HOST
from tests.support.backends.canonical import Rank, follow, program, ranks_of, run_parts, run_whole, same
from tests.support.needs import needs_native

COLLECTIVES = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "shard", "axis_rank"}
OF_THE_HOST = {"token_counts", "prompt_seen", "last_token"}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    """Llama, one head for two ranks, with adapters, on a bucket that verifies guesses."""
    root = tmp_path_factory.getbasetemp() / "canonical"
    return ranks_of("llama", 2, root, kv_heads=1, lora_slots=2, lora_rank=2, speculate=2, bucket=2)


Results = list[list[list[Tensor]]]


@pytest.fixture(scope="module")
def whole(ranks: list[Rank]) -> Results:
    """What the graphs as they are give: nothing writes to what is given."""
    before = [[tensor.clone() for tensor in (*rank.states, *rank.weights)] for rank in ranks]
    results = run_whole(ranks)
    for rank, kept in zip(ranks, before, strict=True):
        assert same([*rank.states, *rank.weights], kept)
    after = results[0][-1][-len(ranks[0].states) :]
    assert any(not same([a], [b]) for a, b in zip(ranks[0].states, after, strict=True))
    return results


def equal(found: Results, wanted: Results) -> bool:
    return all(same(a, b) for one, other in zip(found, wanted, strict=True) for a, b in zip(one, other, strict=True))


def test_host_and_device_put_together_are_the_whole(ranks: list[Rank], whole: Results) -> None:
    splits = [run_parts(split_at(rank.graph.module, len(rank.states), len(rank.inputs), HOST)) for rank in ranks]

    def step(number: int, states: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        return splits[number]([*states, *inputs, *ranks[number].weights])

    assert equal(follow(ranks, step), whole)


def test_a_rank_is_an_input_and_the_programs_are_equal(ranks: list[Rank], whole: Results) -> None:
    made = [rank_as_input(rank.graph.module) for rank in ranks]
    (text,) = {ir_text(graph_to_ir(module, FUNCTIONAL)) for module, _ in made}
    assert "nxd.axis_rank" not in text and "nxd.shard" not in text
    module, axes = made[0]
    assert axes == ["tp"]
    place = placeholders(module.graph)[0].meta["val"]
    assert list(place.shape) == [1], "a number would be written into the program"
    first = program(module)  # rank 0's, for all

    def step(number: int, states: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        return first(torch.tensor([number]), *states, *inputs, *ranks[number].weights)

    assert equal(follow(ranks, step), whole)


def test_plain_operators_compute_the_same_and_are_pytorchs(ranks: list[Rank], whole: Results) -> None:
    plain = [plain_operators(rank.graph.module) for rank in ranks]
    for name, *_ in graph_to_ir(plain[0], FUNCTIONAL)["nodes"]:
        assert not name.startswith("nxd") or name.split(".")[1] in COLLECTIVES
    kept = plain_operators(ranks[0].graph.module, HOST)
    wanted = {node.target for node in ranks[0].graph.module.graph.nodes} & HOST
    assert wanted and {node.target for node in kept.graph.nodes} & HOST == wanted
    programs = [program(module) for module in plain]

    def step(number: int, states: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        return programs[number](*states, *inputs, *ranks[number].weights)

    assert equal(follow(ranks, step), whole)


def test_the_host_writes_its_states_where_they_are(ranks: list[Rank]) -> None:
    """A copy of what every slot has said so far would be made at every step."""
    rank = ranks[0]
    (lowered,) = lower_graphs([rank.graph])
    parts = PartsFile.model_validate_json(lowered.files[PARTS_FILE])
    states = dict(zip((spec.name for spec in rank.graph.file.states), parts.given, strict=False))
    host = [states[name] for name in OF_THE_HOST]
    assert set(host) <= {*parts.tail.takes, *parts.head.takes} and set(host).isdisjoint(parts.body.takes)
    assert "aten.clone" not in lowered.files[TAIL_FILE]
    cache = next(name for name in states if "cache" in name)
    new = parts.new_states[parts.given.index(states[cache])]
    assert new in parts.body.gives and new not in parts.fetched and new != states[cache]


@needs_native
def test_a_graph_of_native_operators_is_refused(ranks: list[Rank]) -> None:
    module = copied(ranks[0].graph.module)
    insert_operators(module, native.load(), {})
    with pytest.raises(TraceError, match="a native operator"):
        plain_operators(module)
