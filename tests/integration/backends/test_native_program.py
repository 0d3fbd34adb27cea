"""Stored graphs run by the loop in C++, compared bit by bit with the one in Python, which calls PyTorch's operators."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nxd_infer import native as operators
from nxd_infer.backends.cpu.program import library, native_program
from nxd_infer.errors import ArtifactCorruptError
from nxd_infer.graph.ir import Program

STATE, INPUTS = 0, (1, 2, 3)


def placeholders() -> list[Tensor]:
    """A state and three inputs: a matrix, a row, a column of integers."""
    torch.manual_seed(0)
    return [torch.randn(4, 3), torch.randn(4, 3), torch.randn(3), torch.arange(3).view(3, 1)]


BRANCH = {"ir": 1, "inputs": 2, "outputs": [{"$": 2}, {"$": 0}]}
BRANCHES = [{**BRANCH, "nodes": [[f"aten.{name}.Tensor", [{"$": 0}, {"$": 1}]]]} for name in ("add", "sub")]
FUSED = "1 4 float32 3 float32 3 ; add float32 0 1 ; silu float32 2 ; -> 3 0 2 0"
OWN = operators.load().namespace if operators.is_built() else "nxd"
PLANNED_BRANCHES = [
    {
        "ir": 1,
        "inputs": 2,
        "nodes": [
            [f"{OWN}.fused.default", [[{"$": number}, {"$": 0}], FUSED]],
            ["getitem", [{"$": 2}, 0]],
            ["aten.relu.default", [{"$": 3}]],
        ],
        "outputs": [{"$": 4}, {"$": 1}],
    }
    for number in (0, 1)
]
NODES: list[tuple[str, list[Any], dict[str, Any]]] = [
    (f"{OWN}.fused.default", [["matrix", "matrix"], FUSED], {}),
    (f"{OWN}.fused.default", [["matrix", "matrix"], FUSED], {}),
    (f"{OWN}.packed_linears.default", ["matrix", ["matrix", "matrix"], False], {}),
    ("higher_order.cond", ["flag", *({"graph": branch} for branch in PLANNED_BRANCHES), ["matrix", "matrix"]], {}),
    ("aten.add.Tensor", ["x", "x"], {"alpha": 2}),
    ("aten.mul.Tensor", ["x", "x"], {}),
    ("aten.mul.Tensor", ["x", 3], {}),
    ("aten.mul.Tensor", ["x", 0.5], {}),
    ("aten.sub.Scalar", ["x", 1.5], {}),
    ("aten.div.Tensor_mode", ["x", 2], {"rounding_mode": "floor"}),
    ("aten.clamp.default", ["x", None, 0.75], {}),
    ("aten.where.self", ["condition", "x", "x"], {}),
    ("aten.gt.Tensor", ["x", "x"], {}),
    ("aten.to.dtype", ["x", {"dtype": "bfloat16"}], {}),
    ("aten.to.dtype", ["x", {"dtype": "float64"}], {}),
    (
        "aten._to_copy.default",
        ["x"],
        {"dtype": {"dtype": "int32"}, "memory_format": {"memory_format": "preserve_format"}},
    ),
    ("aten.clone.default", ["x"], {"memory_format": {"memory_format": "contiguous_format"}}),
    ("aten.full.default", [[4, 3], {"float": "-inf"}], {"dtype": {"dtype": "float32"}, "device": {"device": "cpu"}}),
    ("aten.full.default", [[], 2], {}),
    ("aten.sum.dim_IntList", ["x", []], {}),
    ("aten.item.default", ["flag"], {}),
    ("aten.mul.Tensor", ["x", "number"], {}),
    ("aten.add.Scalar", ["x", "number"], {}),
    ("aten.arange.default", [3], {"dtype": None, "layout": {"layout": "strided"}, "pin_memory": False}),
    ("aten.unsqueeze.default", ["x", 0], {}),
    ("aten.t.default", ["x"], {}),
    ("aten.reshape.default", ["x", [-1]], {}),
    ("aten.slice.Tensor", ["x", 0, 1, 9223372036854775807], {}),
    ("aten.select.int", ["x", 0, -1], {}),
    ("aten.expand.default", ["x", [2, -1, -1]], {}),
    ("aten.sum.dim_IntList", ["x", [0], True], {}),
    ("aten.mean.dim", ["x", [-1]], {"dtype": {"dtype": "float32"}}),
    ("aten.softmax.int", ["x", -1, {"dtype": "float64"}], {}),
    ("aten.max.dim", ["x", 0], {}),
    ("aten.split.Tensor", ["x", 2], {}),
    ("aten.unbind.int", ["x", -1], {}),
    ("getitem", ["several", 0], {}),
    ("getitem", ["several", -1], {}),
    ("aten.cat.default", [["x", "x"], 0], {}),
    ("aten.stack.default", [["x", "x"]], {}),
    ("aten.index.Tensor", ["x", ["indices"]], {}),
    ("aten.index.Tensor", ["x", [None, "indices"]], {}),
    ("aten.add_.Tensor", ["state", "x"], {}),
    ("aten.copy_.default", ["state", "x"], {}),
    ("aten.index_put_.default", ["state", ["indices"], "x"], {}),
    ("aten.new_zeros.default", ["x", [2, 2]], {}),
    ("aten.linear.default", ["x", "x", None], {}),
    ("aten.any.default", ["x"], {}),
    ("higher_order.cond", ["flag", {"graph": BRANCHES[0]}, {"graph": BRANCHES[1]}, ["x", "x"]], {}),
]


class Grown:
    """A graph that is grown node by node; what PyTorch refuses is not added."""

    def __init__(self):
        self.nodes: list[list[Any]] = []
        self.values: list[Any] = placeholders()

    def suits(self, kind: str, number: int) -> bool:
        value = self.values[number]
        if kind == "state":
            return number == STATE
        if kind in ("several", "number"):
            return isinstance(value, (list, tuple) if kind == "several" else (bool, int, float))
        if not isinstance(value, Tensor):
            return False
        if kind == "flag":
            return value.numel() == 1
        if kind == "matrix":
            return value.shape == (4, 3) and value.dtype == torch.float32 and value.is_contiguous()
        return kind == "x" or value.dtype == {"condition": torch.bool, "indices": torch.int64}[kind]

    def add(self, choose: Callable[[list[int]], int], name: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        def filled(value: Any) -> Any:
            if isinstance(value, str) and value.isalpha():
                known = [number for number in range(len(self.values)) if self.suits(value, number)]
                if not known:
                    raise LookupError(value)
                return {"$": choose(known)}
            return [filled(v) for v in value] if isinstance(value, list) else value

        try:
            node = [name, filled(args), kwargs]
            ir = {"ir": 1, "inputs": len(self.values), "nodes": [node], "outputs": [{"$": len(self.values)}]}
            (value,) = Program(ir)(*self.values)
        except (RuntimeError, LookupError, TypeError, ValueError):
            return
        self.values.append(value)
        self.nodes.append(node)

    def ir(self) -> dict[str, Any]:
        tensors = [number for number, value in enumerate(self.values) if isinstance(value, Tensor)]
        return {"ir": 1, "inputs": 4, "nodes": self.nodes, "outputs": [{"$": number} for number in tensors]}


def native(ir: dict[str, Any], values: list[Tensor]) -> list[Tensor]:
    """Run with the state held and the last placeholder as a weight; before that three times on other tensors, of which
    the first run lays out the later ones. What runs return is not touched by later ones."""
    made = native_program(Program(ir))
    first, second = ([v * n if v.is_floating_point() else v.clone() for v in values] for n in (1, 2))
    earlier: list[tuple[Tensor, Tensor]] = []
    for others in (first, second, second):
        made.hold(others[:1], values[3:])
        given = {tensor.untyped_storage().data_ptr() for tensor in (*others, *values)}
        made_now = [r for r in made.run(others[1:3]) if r.untyped_storage().data_ptr() not in given]
        earlier += [(result, bits(result).clone()) for result in made_now]
    made.hold(values[:1], values[3:])
    results = made.run(values[1:3])
    assert all(torch.equal(bits(result), before) for result, before in earlier)
    return results


def bits(x: Tensor) -> Tensor:
    """Its bytes, of a copy: one number counts as contiguous with any stride, and then has no view as bytes."""
    return x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and torch.equal(bits(a), bits(b))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_random_graphs_have_the_bits_of_pytorch(data):
    """Views, states changed in place, types, broadcasts, lists, branches, several results."""
    grown = Grown()
    for _ in range(data.draw(st.integers(1, 25))):
        grown.add(lambda known: data.draw(st.sampled_from(known)), *data.draw(st.sampled_from(NODES)))
    ir = json.loads(json.dumps(grown.ir()))
    ir["outputs"] = [value for value in ir["outputs"] if data.draw(st.booleans())]  # others die after their last use
    one, other = placeholders(), placeholders()
    expected, found = Program(ir)(*one), native(ir, other)
    assert all(map(same, found, expected)) and len(found) == len(expected)
    assert same(one[STATE], other[STATE])


def test_a_failing_step_is_named_and_the_program_runs_again():
    ir = {"ir": 1, "inputs": 2, "nodes": [["aten.add.Tensor", [{"$": 0}, {"$": 1}]]], "outputs": [{"$": 2}]}
    made = native_program(Program(ir))
    made.hold([], [])
    with pytest.raises(RuntimeError, match=r"size of tensor a \(2\).*in step 0 of a graph, aten::add.Tensor"):
        made.run([torch.ones(2), torch.ones(3)])
    assert made.run([torch.ones(2), torch.ones(2)])[0].tolist() == [2, 2]
    with pytest.raises(ValueError, match="1 values for 2 placeholders"):
        made.run([torch.ones(2)])


def test_a_number_that_is_written_to_is_new_in_each_run():
    ir = {"ir": 1, "inputs": 1, "nodes": [["aten.add_.Tensor", [2.0, {"$": 0}]]], "outputs": [{"$": 1}]}
    made = native_program(Program(ir))
    assert [float(made.run([torch.tensor(1.0)])[0]) for _ in range(2)] == [3, 3]


def test_what_counts_from_the_beginning_of_memory_is_no_view_to_keep():
    nodes = [["aten.as_strided.default", [{"$": 0}, [2], [1], 3]], ["aten.mul.Tensor", [{"$": 1}, 1]]]
    made = native_program(Program({"ir": 1, "inputs": 1, "nodes": nodes, "outputs": [{"$": 2}]}))
    memory = torch.arange(16.0)
    assert [made.run([part])[0].tolist() for part in (memory[:8], memory[8:])] == [[3, 4]] * 2


def test_an_operator_of_others_may_have_a_kernel_for_autograd_alone():
    with torch.library._scoped_library("program_of_others", "DEF") as others:
        others.define("twice(Tensor x) -> Tensor")
        others.impl("twice", lambda x: x + x, "Autograd")
        nodes = [["program_of_others.twice.default", [{"$": 0}]]]
        made = native_program(Program({"ir": 1, "inputs": 1, "nodes": nodes, "outputs": [{"$": 1}]}))
        assert made.run([torch.ones(2)])[0].tolist() == [2, 2]


def test_a_placeholder_may_lie_differently_in_the_next_run():
    nodes = [
        ["aten.t.default", [{"$": 0}]],
        [f"{OWN}.fused.default", [[{"$": 1}, {"$": 1}], "1 3 float32 3 float32 3 ; mul float32 0 1 ; -> 2 0"]],
        ["getitem", [{"$": 2}, 0]],
        ["aten.neg.default", [{"$": 3}]],
    ]
    made = native_program(Program({"ir": 1, "inputs": 1, "nodes": nodes, "outputs": [{"$": 4}]}))
    x = torch.arange(9.0).view(3, 3)
    for _ in range(4):
        for _ in range(2):
            assert torch.equal(made.run([x])[0], -(x.T**2))
        x.t_()
    x.set_(torch.eye(3) * 2)  # the same tensor with other memory
    assert torch.equal(made.run([x])[0], torch.eye(3) * -4)


def test_a_planned_step_that_fails_leaves_a_program_that_runs():
    caches = [torch.zeros(2, 1, 8, 4) for _ in range(2)]
    nodes = [
        ["aten.relu.default", [{"$": 2}]],
        [f"{OWN}.cache_attention.default", [{"$": n} for n in (6, 6, 6, 0, 1, 3, 4, 5)] + [1.0]],
        [f"{OWN}.fused.default", [[{"$": 7}], "3 1 2 1 float32 4 ; copy float32 0 ; -> 1 0 1 2"]],
        ["getitem", [{"$": 8}, 0]],
        ["aten.abs.default", [{"$": 9}]],
    ]
    made = native_program(Program({"ir": 1, "inputs": 6, "nodes": nodes, "outputs": [{"$": 10}]}))
    made.hold(caches, [])
    x, length = torch.ones(1, 2, 1, 4), torch.tensor([2])
    for block, start in [(0, 0), (1, 0), (2, 0), (1, 0), (0, -1), (0, 0)]:
        inputs = [x, torch.tensor([[block]]), torch.tensor([start]), length]
        if block == 2 or start < 0:
            with pytest.raises(RuntimeError, match=r"block_table\[0, 0\] = 2 is none|start\[0\] = -1 is negative"):
                made.run(inputs)
        else:
            assert made.run(inputs)[0].allclose(x)


@pytest.mark.parametrize("why", ["no cache", "no compiler", "a cut library"])
def test_where_the_loop_cannot_be_built_graphs_run_in_python(tmp_path, why):
    cache = "/proc/nothing" if why == "no cache" else str(tmp_path)
    tmp_path.chmod(0o700)
    if why == "a cut library":
        built = library().file()
        place = tmp_path / "native" / built.parent.name / built.name
        place.parent.mkdir(parents=True, mode=0o700)
        place.write_bytes(built.read_bytes()[:9000])
        place.chmod(0o700)
    code = """
from nxd_infer.backends.cpu import program
ir = {"ir": 1, "inputs": 1, "nodes": [["aten.relu.default", [{"$": 0}]]], "outputs": [{"$": 1}]}
for _ in range(2):
    loaded = program.load(ir)
    loaded.hold([], [])
    print(type(loaded).__name__, loaded.run([program.torch.tensor([-1.0, 2.0])])[0].tolist())
"""
    env = {**os.environ, "NXD_INFER_CACHE": cache, "CXX": "false"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert done.stdout == "InPython [0.0, 2.0]\n" * 2, done.stderr
    assert done.stderr.count("slower loop in Python") == 1


DAMAGED = {
    "an operator that is none": ["aten.no_such.default", [{"$": 0}]],
    "too many arguments": ["aten.relu.default", [{"$": 0}, {"$": 0}]],
    "an unknown name": ["aten.relu.default", [{"$": 0}], {"inplace": True}],
    "an argument twice": ["aten.relu.default", [{"$": 0}], {"self": {"$": 0}}],
    "none where one is needed": ["aten.add.Tensor", [{"$": 0}]],
    "a word for a number": ["aten.add.Scalar", [{"$": 0}, "one"]],
    "a number for a list of tensors": ["aten.cat.default", [1]],
    "tensors for numbers": ["aten.sum.dim_IntList", [{"$": 0}, [{"$": 0}]]],
    "a constant among tensors": ["aten.cat.default", [[{"$": 0}, 3]]],
    "None among tensors": ["aten.cat.default", [[{"$": 0}, None]]],
    "a dtype that is none": ["aten.to.dtype", [{"$": 0}, "float32"]],
    "a later value": ["aten.relu.default", [{"$": 9}]],
    "an item of no number": ["getitem", [{"$": 0}, "a"]],
    "an item of a constant": ["getitem", [[1, 2], 0]],
    "branches that are none": ["higher_order.cond", [{"$": 0}, 1, 2, []]],
    "branches of other operands": ["higher_order.cond", [{"$": 0}, *({"graph": b} for b in BRANCHES), [{"$": 0}]]],
}


@pytest.mark.parametrize("node", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_graph_is_refused(node):
    with pytest.raises(ArtifactCorruptError, match="graph"):
        native_program(Program({"ir": 1, "inputs": 1, "nodes": [node], "outputs": [{"$": 1}]}))


WRONG_AT_A_RUN = {
    "an item that is missing": ([["aten.unbind.int", [{"$": 0}, 0]], ["getitem", [{"$": 1}, 7]]], IndexError),
    "an item of a tensor": ([["aten.relu.default", [{"$": 0}]], ["getitem", [{"$": 1}, 0]]], RuntimeError),
    "several results as one": ([["aten.unbind.int", [{"$": 0}, 0]], ["aten.relu.default", [{"$": 1}]]], RuntimeError),
    "one result as several": ([["aten.relu.default", [{"$": 0}]], ["aten.cat.default", [{"$": 1}]]], RuntimeError),
    "a number as a result": ([["aten.relu.default", [{"$": 0}]], ["aten.item.default", [{"$": 1}]]], RuntimeError),
}


@pytest.mark.parametrize("nodes, error", WRONG_AT_A_RUN.values(), ids=WRONG_AT_A_RUN.keys())
def test_what_only_a_run_can_see_is_an_error_of_the_run(nodes, error):
    made = native_program(Program({"ir": 1, "inputs": 1, "nodes": nodes, "outputs": [{"$": len(nodes)}]}))
    made.hold([], [])
    with pytest.raises(error):
        made.run([torch.ones(1)])


def test_threads_take_turns_and_steps_leave_nothing_behind():
    """Ten thousand steps over two programs of one process, from four threads, with a step that fails now and then."""
    nodes = [
        ["aten.mul.Tensor", [{"$": 0}, {"$": 1}]],
        ["aten.split.Tensor", [{"$": 2}, 100]],
        ["getitem", [{"$": 3}, 1]],
        ["higher_order.cond", [{"$": 4}, *({"graph": branch} for branch in BRANCHES), [{"$": 0}, {"$": 2}]]],
        ["getitem", [{"$": 5}, 0]],
    ]
    ir = {"ir": 1, "inputs": 2, "nodes": nodes, "outputs": [{"$": 6}]}
    programs = [native_program(Program(ir)) for _ in range(2)]
    for factor, program in zip((2.0, 3.0), programs, strict=True):
        program.hold([], [torch.tensor(factor)])

    def steps(count: int, start: float) -> None:
        x = torch.full((101,), start)
        for number in range(count):
            if number % 50 == 0:
                with pytest.raises(RuntimeError):
                    programs[0].run([torch.ones(1000)])
            for factor, program in zip((2.0, 3.0), programs, strict=True):
                (y,) = program.run([x])
                assert torch.equal(y, x * (1 + factor))

    def both(count: int) -> None:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(steps, [count] * 4, [1.0, 2.0, 3.0, 4.0], timeout=300))

    both(50)
    before = resident()
    both(1200)
    assert resident() - before < 4 << 20  # each step makes 1.2 KB; none is left


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_what_was_held_before_is_not_kept():
    nodes = [["aten.sum.default", [{"$": 1}]], ["aten.add.Tensor", [{"$": 0}, {"$": 2}]]]
    made = native_program(Program({"ir": 1, "inputs": 2, "nodes": nodes, "outputs": [{"$": 3}]}))
    memory = np.ones(100, np.float32)
    of_it = weakref.ref(memory)
    made.hold([], [torch.from_numpy(memory)])
    del memory
    assert [made.run([torch.zeros(1)])[0].item() for _ in range(2)] == [100] * 2 and of_it() is not None
    made.hold([], [torch.ones(2)])
    assert of_it() is None
    assert made.run([torch.zeros(1)])[0].item() == 2


DOUBLED = [
    [f"{OWN}.fused.default", [[{"$": 0}], "1 3 float32 3 ; add float32 0 0 ; -> 1 0"]],
    ["getitem", [{"$": 1}, 0]],
]


def test_a_result_keeps_its_place_while_a_view_of_it_is_used():
    squared = "1 3 float32 3 ; mul float32 0 0 ; -> 1 0"
    nodes = [
        *DOUBLED,
        ["aten.view.default", [{"$": 2}, [9]]],
        [f"{OWN}.fused.default", [[{"$": 0}], squared]],
        ["getitem", [{"$": 4}, 0]],
        ["aten.view.default", [{"$": 5}, [9]]],
        ["aten.sub.Tensor", [{"$": 3}, {"$": 6}]],
    ]
    made = native_program(Program({"ir": 1, "inputs": 1, "nodes": nodes, "outputs": [{"$": 7}]}))
    x = torch.arange(9.0).view(3, 3)
    assert all(torch.equal(made.run([x])[0], (2 * x - x * x).view(9)) for _ in range(3))


@pytest.mark.parametrize("change", ["t_", "unsqueeze_"])
def test_what_turns_a_tensor_in_place_turns_it_once_in_each_run(change: str):
    turned = [f"aten.{change}.default", [{"$": 2}, *([0] if change == "unsqueeze_" else [])]]
    nodes = [*DOUBLED, turned, ["aten.mul.Tensor", [{"$": 2}, {"$": 0}]]]
    made = native_program(Program({"ir": 1, "inputs": 1, "nodes": nodes, "outputs": [{"$": 4}]}))
    x = torch.arange(9.0).view(3, 3)
    expected = (x.T if change == "t_" else x[None]) * 2 * x
    assert all(torch.equal(made.run([x])[0], expected) for _ in range(5))


def test_shapes_that_depend_on_values_may_be_others_in_each_run():
    linear = [f"{OWN}.packed_linears.default", [{"$": 4}, [{"$": 1}], False]]
    nodes = [
        ["aten.where.default", [{"$": 0}]],
        ["getitem", [{"$": 2}, 0]],
        ["aten.index_select.default", [{"$": 1}, 0, {"$": 3}]],
        linear,
        ["getitem", [{"$": 5}, 0]],
        ["aten.neg.default", [{"$": 6}]],
    ]
    made = native_program(Program({"ir": 1, "inputs": 2, "nodes": nodes, "outputs": [{"$": 7}]}))
    weight = torch.randn(32, 32)
    plain = getattr(torch.ops, OWN).packed_linears
    for count in (3, 3, 3, 1, 1, 1, 30, 2, 2, 0, 5, 5):
        mask = torch.arange(32) < count
        assert torch.equal(made.run([mask, weight])[0], -plain(weight[mask], [weight], False)[0])


def test_an_operator_of_others_may_keep_its_argument():
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x + 1

    with torch.library._scoped_library("program_of_keepers", "DEF") as others:
        others.define("keep(Tensor x) -> Tensor")
        others.impl("keep", keep, "CPU")
        nodes = [*DOUBLED, ["program_of_keepers.keep.default", [{"$": 2}]]]
        made = native_program(Program({"ir": 1, "inputs": 1, "nodes": nodes, "outputs": [{"$": 3}]}))
        for number in range(4):
            made.run([torch.full((3, 3), float(number))])
    assert [x[0, 0].item() for x in kept] == [0, 2, 4, 6]
