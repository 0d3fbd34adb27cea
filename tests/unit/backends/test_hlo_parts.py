"""The passes of backends on XLA devices, and what the xla backend says of itself: torch_xla is not needed for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxd_infer import comm
from nxd_infer.backends import registry
from nxd_infer.backends.base import check_quantize
from nxd_infer.backends.hlo.collectives import check_collectives, collectives_of
from nxd_infer.backends.hlo.files import BODY_FILE, PARTS_FILE, PartsFile, read
from nxd_infer.backends.hlo.module import Module
from nxd_infer.backends.hlo.parts import lower_graphs
from nxd_infer.context import current_context, make_context, use_context
from nxd_infer.errors import ArtifactCorruptError, ArtifactVersionError, TraceConfigError, TraceError
from nxd_infer.ops import sample_adjusted
from tests.support.backends.canonical import Rank

SAMPLED = torch.ones(2, 8)


class Calls(nn.Module):
    """Calls a function on itself and its input."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def parts_of(function: Callable[..., Any], example: Tensor, degree: int = 1) -> Any:
    with use_context(make_context(degree, 0, tp=degree, collectives="none")):
        rank = Rank(Calls(function).eval(), (example,), (), 0)
    return lower_graphs([rank.graph])[0]


def sampled(x: Tensor) -> Tensor:
    """Scores that were looked at by the sampler."""
    ones, rows = torch.ones(len(x)), torch.zeros(len(x), dtype=torch.int64)
    return sample_adjusted(x, ones, rows, ones, 0 * ones, rows, rows, 1)[1]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda self, x: x >> 1, r"-5 >> 1 is -2 and -3"),
        (lambda self, x: (x + 1).bitwise_right_shift_(1), r"bitwise_right_shift.* of signed numbers"),
        (
            lambda self, x: torch.cond(x.sum() > 1, lambda x: x + 1, lambda x: x - 1, (x,)),
            r"torch\.cond.*choose with torch\.where",
        ),
        (lambda self, x: x.view(torch.float64), r"aten\.view\.dtype: XLA does not read a tensor's bits"),
    ],
    ids=["a shift", "a shift in place", "a branch", "a bit cast"],
)
def test_what_no_device_can_do_is_refused(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(TraceError, match=words):
        parts_of(function, torch.ones(4, dtype=torch.int64))


def test_shifts_of_unsigned_numbers_and_to_the_left_are_fine() -> None:
    assert "shift" in parts_of(lambda self, x: x << 1, torch.ones(4, dtype=torch.int64)).files[BODY_FILE]
    assert "shift" in parts_of(lambda self, x: x >> 1, torch.ones(4, dtype=torch.uint8)).files[BODY_FILE]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda self, x: sampled(x).sum() * self.weight, r"the weight 'weight' is read by what follows"),
        (lambda self, x: comm.all_reduce(sampled(x), current_context()), "a collective follows a sampling operator"),
    ],
    ids=["a weight", "a collective"],
)
def test_what_the_host_cannot_do_is_refused(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(TraceError, match=words):
        parts_of(function, SAMPLED, degree=2)


def test_damaged_parts_are_named(tmp_path: Any) -> None:
    with pytest.raises(ArtifactCorruptError, match=r"parts\.json cannot be read"):
        read(tmp_path, PARTS_FILE, PartsFile)


# --- collectives --------------------------------------------------------------------------------------


def module_of(*instructions: dict[str, Any], reduction: str = "add") -> Module:
    import json

    shape = {"elementType": "BF16", "dimensions": ["2", "4"]}
    program = {"id": "1", "rootId": "9", "instructions": [{"id": "9", "opcode": reduction}]}
    operand = {"id": "2", "opcode": "parameter"}
    entry = {"id": "3", "rootId": "5", "instructions": [operand, *instructions]}
    for computation in (program, entry):
        for instruction in computation["instructions"]:
            instruction.update(name="", shape=shape)
    return Module(json.dumps({"computations": [program, entry], "entryComputationId": "3"}))


def call(opcode: str, groups: list[list[str]], **more: Any) -> dict[str, Any]:
    found = [{"replicaIds": group} for group in groups]
    return {"id": "5", "opcode": opcode, "operandIds": ["2"], "replicaGroups": found, **more}


def test_collectives_of_hlo_read_like_a_graphs() -> None:
    both = [["0", "1"]]
    reduce = call("all-reduce", both, calledComputationIds=["1"])
    assert collectives_of(module_of(reduce, reduction="maximum")) == ["all_reduce(bfloat16[2, 4], tp, max, 2)"]
    assert collectives_of(module_of(call("all-gather", both, dimensions=["1"]))) == [
        "all_gather(bfloat16[2, 4], tp, 1, 2)"
    ]
    scatter = call("reduce-scatter", both, calledComputationIds=["1"])
    assert collectives_of(module_of(scatter)) == ["reduce_scatter(bfloat16[2, 4], tp, 0, 2)"]


@pytest.mark.parametrize(
    "found",
    [call("all-gather", [["1", "0"]]), call("all-gather", [["0"], ["1"]]), call("collective-permute", [["0", "1"]])],
    ids=["another order", "two groups", "another kind"],
)
def test_a_collective_that_no_graph_has_is_refused(found: dict[str, Any]) -> None:
    with pytest.raises(TraceError, match="no operator of the graph stands for"):
        collectives_of(module_of(found))


def test_a_broadcast_is_listed_as_what_it_becomes() -> None:
    check_collectives(["all_gather(float32[1, 2, 3], tp, 0, 4)"], ["broadcast(float32[2, 3], tp, 1, 4)"])
    check_collectives(["all_gather(float32[1], tp, 0, 4)"], ["broadcast(float32[], tp, 1, 4)"])
    with pytest.raises(TraceError, match=r"lacks 1 x all_reduce.*has none besides"):
        check_collectives([], ["all_reduce(float32[], tp, sum, 2)"])
    with pytest.raises(TraceError, match=r"lacks none and has 1 x all_gather"):
        check_collectives(["all_gather(float32[1], tp, 0, 4)"], [])


# --- the xla backend, as those see it who have no torch_xla -------------------------------------------

XLA = registry.get("xla")


def test_it_takes_no_options() -> None:
    assert XLA.options({}) == {} and not XLA.has_option("anything")
    with pytest.raises(TraceConfigError, match=r"takes no compiler_args, got \{'fast': True\}: leave them out"):
        XLA.options({"fast": True})
    with pytest.raises(TraceConfigError, match=r"got quantize='int8': leave it out"):
        check_quantize(XLA, "int8")


def test_another_revision_is_refused() -> None:
    XLA.check_target(XLA.target({}), {})
    with pytest.raises(ArtifactVersionError, match="another revision than 1"):
        XLA.check_target({"revision": 2}, {})
