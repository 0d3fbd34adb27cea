"""Exporting and lowering one module: specs, constants, digests, nested graphs, names. Eager, in this process."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from transformers.modeling_outputs import BaseModelOutputWithPooling

from nxd_infer.artifact.structure import filled, names_in
from nxd_infer.backends.cpu.lower import PROGRAM_FILE
from nxd_infer.context import make_context
from nxd_infer.errors import (
    ArtifactCorruptError,
    InputMismatchError,
    ModelClosedError,
    TraceConfigError,
    TraceError,
    WeightSchemaError,
)
from nxd_infer.graph import ir
from nxd_infer.graph.export import Step, named_inputs
from nxd_infer.graph.stored import ir_text, read_ir
from nxd_infer.modules.nxd_model import NxDModel
from tests.support.graph.exporting import entries, follow, load, loaded, lowered, operators
from tests.support.ops.native_attention import Attend


def test_decision_5_dtype_shape_and_stride_of_everything_are_checked(tmp_path):
    module = nn.Linear(4, 3)
    module.register_buffer("memory", torch.zeros(2, 3))
    entry, _ = lowered(module, torch.randn(2, 4), states=["memory"])
    run, states, weights = loaded(module, entry, tmp_path)
    spec = entry.graph.spec()
    for name, wrong in (
        ("dtype", weights["weight"].double()),
        ("shape", weights["weight"].t()),
        ("stride", weights["weight"].t().contiguous().t()),
    ):
        with pytest.raises(WeightSchemaError, match=f"'weight' has {name}"):
            load("eager", tmp_path, spec, states, {**weights, "weight": wrong})
        with pytest.raises(WeightSchemaError, match=f"'weight' has {name}"):
            run.update_weights({"weight": wrong})
    with pytest.raises(InputMismatchError, match="'memory' has stride"):
        load("eager", tmp_path, spec, {"memory": torch.zeros(3, 2).t()}, weights)
    with pytest.raises(WeightSchemaError, match="'bias' is missing"):
        load("eager", tmp_path, spec, states, {"weight": weights["weight"]})
    for wrong in (torch.randn(2, 4).double(), torch.randn(1, 4), "text"):
        with pytest.raises(InputMismatchError, match="'input'"):
            run([wrong])
    with pytest.raises(InputMismatchError, match="2 inputs"):
        run([torch.randn(2, 4)] * 2)
    x = torch.randn(4, 2)
    assert torch.allclose(run([x.t()])[0], module(x.t()))  # an input's stride is put right
    run.update_weights({"weight": torch.zeros(3, 4)})
    assert torch.equal(run([x.t()])[0], module.bias.expand(2, 3))
    with pytest.raises(WeightSchemaError, match="'other'"):
        run.update_weights({"other": torch.ones(1)})
    run.close()
    with pytest.raises(ModelClosedError):
        run([x.t()])


class Constants(nn.Module):
    """Everything a compiler likes to bake in: small constants, uniform weights, scalars."""

    def __init__(self, value: float = 1.0):
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.register_buffer("offset", torch.tensor([value]))
        self.table = torch.tensor([value, 2.0, 3.0])

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.offset + self.table + torch.tensor([1.0, 2.0]).sum()


def test_decision_7_no_constant_is_in_the_graph(tmp_path):
    module, other = Constants(1.0), Constants(7.0)
    x = torch.randn(2, 3)
    entry, other_entry = (lowered(one, x)[0] for one in (module, other))
    assert entry.digest == other_entry.digest
    assert {spec.kind for spec in entry.graph.weights} == {"parameter", "buffer", "constant"}
    run, _, _ = loaded(other, other_entry, tmp_path)
    assert torch.allclose(run([x])[0], other(x), atol=1e-6)


def test_decision_10_and_12_collectives_are_recorded_in_order_and_unused_ones_are_dropped():
    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.context = make_context(2, 1, tp=2)

        def forward(self, x: Tensor) -> Tensor:
            from nxd_infer import comm

            comm.all_reduce(x, self.context)
            y = comm.all_gather(x * 2, self.context, dim=0)
            return comm.all_reduce(y, self.context, op="max")

    entry, _ = lowered(Three(), torch.ones(2, 3))
    assert entry.graph.collectives == ["all_gather(float32[2, 3], tp, 0, 2)", "all_reduce(float32[4, 3], tp, max, 2)"]


def test_decision_12_the_digest_covers_configuration_and_specs():
    module, x = nn.Linear(4, 4), torch.randn(2, 4)
    base = lowered(module, x)[0].digest
    assert base == lowered(nn.Linear(4, 4), torch.zeros(2, 4))[0].digest
    assert base != lowered(module, torch.randn(3, 4))[0].digest
    assert base != lowered(nn.Linear(4, 4, bias=False), x)[0].digest
    tensors, keyword = named_inputs(module, [x])
    assert base != entries([Step(module, tensors, keyword)], configuration={"options": {"cpp.threads": 2}})[0].digest


class Nested(nn.Module):
    """Regions of autocast and of no_grad, which export as nested graphs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = self.linear(x)
            with torch.autocast("cpu", enabled=False):
                full = self.linear(x)
        with torch.enable_grad():
            kept = x * 2
        return half.float() + full + kept


class Masks(nn.Module):
    """As the masks of transformers 4 are made: lookups under vmap are a function of autograd."""

    def forward(self, table: Tensor, rows: Tensor) -> Tensor:
        with TransformGetItemToIndex():
            return torch.vmap(lambda row: table[row])(rows) + 1


@pytest.mark.parametrize(
    ("module", "calls"),
    [
        (Nested(), [(torch.randn(2, 3),)]),
        (Masks(), [(torch.randn(5), torch.tensor([3, 0, 4]))]),
        (Attend(), [(torch.randn(2, 3, 8, 16), torch.tensor([[1], [0]]), torch.full((2,), 3), torch.tensor([3, 3]))]),
    ],
    ids=["autocast", "a Python function", "a composite operator"],
)
def test_decision_8_what_is_nested_in_a_graph_is_inlined(module, calls, tmp_path):
    entry, _ = follow(module, tmp_path, calls)
    names = " ".join(operators(entry))
    assert not any(word in names for word in ("higher_order", "flat_apply", "nxd."))


class Many(nn.Module):
    def forward(self, a: Tensor, *rest: Tensor, pair: tuple[Tensor, Tensor] | None = None) -> Any:
        total = a + sum(rest)
        if pair is not None:
            total = total + pair[0] * pair[1]
        return {"total": total, "parts": (a, [total * 2])}


def test_inputs_are_named_by_the_signature_and_outputs_by_their_keys():
    entry, _ = lowered(Many(), *[torch.ones(2)] * 3)
    assert [spec.name for spec in entry.graph.inputs] == ["a", "rest_0", "rest_1"]
    assert [spec.name for spec in entry.graph.outputs] == ["total", "parts.0", "parts.1.0"]
    parts = {"tuple": ["parts.0", {"list": ["parts.1.0"]}]}
    assert entry.structure == {"dict": [["total", "total"], ["parts", parts]]}
    tensors, keyword = named_inputs(Many(), {"a": torch.ones(2), "pair": (torch.ones(2), torch.ones(2))})
    assert keyword and list(tensors) == ["a", "pair.0", "pair.1"]
    wrapped = NxDModel(NxDModel(Many(), {}), {})
    assert list(named_inputs(wrapped, [torch.ones(2)] * 3)[0]) == ["a", "rest_0", "rest_1"]
    assert entries([Step(Many(), tensors, keyword)])[0].structure["dict"][0] == ["total", "total"]


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Parts:
    logits: Any
    loss: Any = None


def test_what_a_module_returns_keeps_its_form(caplog: pytest.LogCaptureFixture):
    class Mixed(nn.Module):
        def forward(self, x: Tensor) -> Any:
            named = {"n": 3, "inf": -math.inf, 2: [x * 2, "text"], "pair": Pair(x * 3, None), "parts": Parts(x * 4)}
            output = BaseModelOutputWithPooling(last_hidden_state=x * 5, hidden_states=(x * 6, x * 7))
            return (x + 1, None, named), output, {"a.b": x * 8, "a": {"b": x * 9}}, object(), x.max(dim=0)

    x = torch.arange(2.0)
    entry, _ = lowered(Mixed(), x)
    names = [spec.name for spec in entry.graph.outputs]
    assert sorted(names_in(entry.structure)) == sorted(names) and len(set(names)) == 11
    assert "returns a object" in caplog.text
    form = json.loads(json.dumps(entry.structure, allow_nan=False))
    outputs = {name: x * number for number, name in enumerate(names, 1)}
    (first, none, named), output, clash, odd, largest = filled(form, outputs)
    assert none is None and odd is None and first.tolist() == x.tolist()
    assert named["n"] == 3 and named["inf"] == -math.inf and isinstance(named[2], list) and named[2][1] == "text"
    pair = named["pair"]
    assert type(pair).__name__ == "Pair" and pair.second is None and pair.first is pair[0]
    assert named["parts"].loss is None and list(named["parts"]) == ["logits"]
    assert output.pooler_output is None and output[0] is output.last_hidden_state is output["last_hidden_state"]
    assert isinstance(output.hidden_states, tuple) and len(output[:2]) == 2
    assert not torch.equal(clash["a.b"], clash["a"]["b"])
    assert largest.values is largest[0] and largest.indices is largest[1]


class Deciding(nn.Module):
    """What a value decides, by what ``how`` says."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Any:
        if self.how == "branch" and x.sum() > 0:
            return x
        if self.how == "size":
            return x.new_zeros(int(x.sum()))
        if self.how == "shape":
            return x[x > 0]
        if self.how == "number":
            return {"total": x.sum().item()}
        return x.numpy() * 2 if self.how == "numpy" else x.to_sparse()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("branch", r"decides by values .*, at .*test_export.py:\d+: `if self.how == .* and x.sum\(\) > 0:`.*where"),
        ("size", r"decides by values .*, at .*test_export.py:\d+: `return x.new_zeros\(int\(x.sum\(\)\)\)`.*mask"),
        ("shape", r"the shape of 'output_0'.*, at .*test_export.py:\d+: `return x\[x > 0\]`: .* full size"),
        ("number", "'total', which the model returns, is a number read from a tensor .*: return the tensor"),
        ("numpy", r"cannot be exported, at .*test_export.py:\d+: `return x.numpy\(\)"),
        ("sparse", "has the layout torch.sparse_coo"),
    ],
)
def test_what_values_decide_is_refused_with_the_line(how: str, message: str):
    with pytest.raises(TraceError, match=message):
        lowered(Deciding(how), torch.ones(4))


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[], float]):
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x * self.draw()


def test_random_numbers_of_python_and_numpy_are_refused_unless_they_are_seeded():
    for draw in (random.random, np.random.rand, lambda: torch.tensor(np.random.rand(3))):
        with pytest.raises(TraceError, match="Drawing computes with random numbers of Python's or NumPy's generator"):
            lowered(Drawing(draw), torch.ones(3))
    for harmless in (
        lambda: (np.random.seed(3), np.random.rand())[1],
        random.Random(3).random,
        lambda: 2.0 if random.random() < 2 else 3.0,  # drawn whether it matters or not, as layers that are dropped do
    ):
        lowered(Drawing(harmless), torch.ones(3))


def test_values_may_decide_what_stays_inside(tmp_path: Path):
    class Inside(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            rows = torch.nonzero(x > 0)[:, 0]
            return x[x > 0].sum(), x.index_add(0, rows, torch.ones_like(rows, dtype=x.dtype)), x * x.max().item()

    calls = (torch.arange(6.0) - 2, torch.arange(6.0), -torch.ones(6), torch.arange(6.0) - 2)
    follow(Inside(), tmp_path, [[x] for x in calls])


@pytest.mark.parametrize("form", [3, {}, {"tuple": 1}, {"dict": [["a"]]}, {"record": [[1, "a"]]}, {"namedtuple": []}])
def test_what_is_no_form_is_refused(form: Any):
    with pytest.raises(ValueError, match="says nothing of a value's form"):
        names_in(form)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ((torch.ones(2), 3), "is int; only tensors"),
        ({"b": torch.ones(2)}, "names 'b'"),
        (([], torch.ones(2)), "'a' is an empty list"),  # else 'a' would get what is meant for 'c'
        ({"a": torch.ones(2), "c": {}}, "'c' is an empty dict"),
    ],
)
def test_inputs_that_cannot_be_are_refused_by_name(example, message):
    class One(nn.Module):
        def forward(self, a: Tensor, c: Tensor | None = None) -> Tensor:
            return a

    with pytest.raises(TraceConfigError, match=message):
        named_inputs(One(), example)
    with pytest.raises(TraceConfigError, match="holds 3 inputs"):
        named_inputs(One(), [torch.ones(1)] * 3)


def test_a_branch_on_a_value_is_a_trace_error():
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(TraceError, match="Branch decides by values"):
        lowered(Branch(), torch.ones(3))


class Odd(nn.Module):
    """Arguments of every kind a graph can hold."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        filled = torch.full_like(x, float("-inf")).masked_fill(x > 0, 1e-7)
        parts = torch.split(x.to(torch.float64), [1, 2], dim=1)
        chosen = torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))
        wide = torch.nn.functional.pad(x, (1, 1), value=float("nan"))
        return filled, parts[1], chosen, wide.contiguous(memory_format=torch.contiguous_format)


def test_decision_15_the_graph_is_plain_data_that_runs_and_rebuilds(tmp_path):
    entry, _ = lowered(Odd(), torch.ones(2, 3))
    run, _, _ = loaded(Odd(), entry, tmp_path)
    stored = read_ir(tmp_path, PROGRAM_FILE)
    assert stored == json.loads(json.dumps(entry.ir))
    assert read_ir(tmp_path) == json.loads(json.dumps(entry.canonical.ir()))
    rebuilt = ir.ir_to_graph(stored)
    for x in (torch.randn(2, 3), -torch.ones(2, 3), torch.ones(2, 3)):
        want = Odd()(x)
        for got in (run([x]), ir.Program(stored)(x)):
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a.nan_to_num(9), b.nan_to_num(9)) and a.dtype == b.dtype
        assert torch.equal(rebuilt(x)[0], want[0])
    assert ir_text(ir.graph_to_ir(rebuilt)) == ir_text(stored)


@pytest.mark.parametrize("name", ["os.system.default", "aten.no_such.default", "aten.linear", "aten.__class__.x.y"])
def test_an_operator_that_is_none_is_refused(name):
    with pytest.raises(ArtifactCorruptError):
        ir.Program({"ir": 1, "inputs": 1, "nodes": [[name, [{"$": 0}]]], "outputs": [{"$": 1}]})
