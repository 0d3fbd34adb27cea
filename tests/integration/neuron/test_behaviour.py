"""torch_neuronx, the real one or the stand-in, keeps what is relied on beyond its signatures."""

from __future__ import annotations

import fcntl
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nxd_infer.backends.compiler_args import WORDS
from nxd_infer.backends.neuron import compiler, cores, runtime
from nxd_infer.backends.neuron.runtime import Taken
from tests.support.neuron.hlo_samples import lowered, samples
from tests.support.neuron.machines import HAS_XLA, NEEDS_XLA, REAL, TARGET, neuron_machine

pytestmark = pytest.mark.skipif(not HAS_XLA, reason=NEEDS_XLA)
F32 = torch.float32
SHAPE = (2, 4)
SPECS = {
    "x": Taken("USER_INPUT", "x", F32, SHAPE),
    "number": Taken("USER_INPUT", "number", torch.int64, (1,)),
    "state": Taken("INPUT_STATE", "state", F32, SHAPE),
    "weight": Taken("INPUT_WEIGHT", "weight", F32, (4, 4)),
}
ALIASES = {1: "state"}
RESULTS = [(F32, SHAPE), (F32, SHAPE)]
X, NUMBER = torch.arange(8.0).reshape(SHAPE), torch.tensor([3])
_neffs: dict[tuple[str, str], tuple[bytes, list[int]]] = {}


def neff(name: str, target: str, folder: Path) -> tuple[bytes, list[int]]:
    """A program compiled by neuronx-cc, and the order of its parameters."""
    if (name, target) not in _neffs:
        shapes = [(str(spec.dtype).removeprefix("torch."), list(spec.shape)) for spec in SPECS.values()]
        adds = lambda x, number, state, weight: (x @ weight + state + number, state + 1)  # noqa: E731
        build, shapes = (adds, shapes) if name == "adds" else samples()[name]
        context, order = lowered(build, shapes, name)
        (folder / compiler.INPUT).write_bytes(context.hlo())
        compiler.compile_here(folder, {"target": target, WORDS: []})
        _neffs[name, target] = (folder / compiler.NEFF).read_bytes(), order
    return _neffs[name, target]


class Tools:
    """What a check works with: a folder, and a machine that it can describe."""

    def __init__(self, folder: Path, machine: Path):
        self.folder, self.machine = folder, machine

    def program(
        self,
        name: str = "adds",
        aliases: Mapping[int, str] = ALIASES,
        degree: int = 2,
        target: str = TARGET,
        results: Any = RESULTS,
        world: int | None = None,
    ) -> Any:
        code, order = neff(name, target, self.folder)
        names = [*SPECS]
        taken = [SPECS[names[place]] for place in order] if name == "adds" else []
        keys = [each.key for each in taken]
        numbers = {result: keys.index(key) for result, key in aliases.items() if taken}
        message = runtime.metaneff(taken, results, numbers)
        if world is not None:
            return runtime._namespace().SPMDModel(code, message, degree, world)
        return runtime.program(code, message, degree)

    def started(self, weights: str = "weight") -> Any:
        model = self.program()
        loaded = runtime.to_cores([{weights: torch.eye(4)} for _ in range(2)])
        runtime.initialize(model, [{"state": zeros(rank)} for rank in range(2)], loaded)
        return model


def asked(model: Any, x: Tensor = X, number: Tensor = NUMBER) -> list[Tensor]:
    given = {"x": x, "number": number}
    names = [[*SPECS][place] for place in _neffs["adds", TARGET][1]]
    return [result.cpu() for result in runtime.forward(model, [given[name] for name in names if name in given])]


@pytest.fixture
def tools(tmp_path: Path) -> Iterator[Tools]:
    """On a machine of which this process has taken no core yet."""
    with neuron_machine(tmp_path / "machine", "inf2.24xlarge", 6):
        runtime.load()
        if REAL:
            cores.claim(2)
        else:
            os.environ[cores.VISIBLE] = "0-1"
            give_back()
        yield Tools(tmp_path, tmp_path / "machine")
        if not REAL:
            give_back()


def give_back() -> None:
    taken: Any = importlib.import_module("torch_neuronx._cores")
    for file in taken._files:
        os.close(file)
    taken._files.clear()
    taken._taken.clear()


def zeros(rank: int) -> Tensor:
    return runtime.zeros(SHAPE, F32, rank)


def swapped_states(tools: Tools) -> None:
    runtime.initialize(tools.program(), [{"state": zeros(1)}, {"state": zeros(0)}], [{}, {}])


def other_field(tools: Tools) -> None:
    importlib.import_module(runtime.MESSAGE).MetaTensor().kind = b"state"


REFUSED: dict[str, Callable[[Tools], object]] = {
    # --- programs ---
    "float64": lambda tools: tools.program("float64"),
    "a type that NeuronCore-v2 has not": lambda tools: tools.program("int8"),
    "an all-reduce of integers": lambda tools: tools.program("all_reduce_int32"),
    "an arithmetic right shift": lambda tools: tools.program("shift_int64"),
    "a matrix product of integers": lambda tools: tools.program("matmul_int32"),
    "aliases 'x', which is no state": lambda tools: tools.program(aliases={0: "x"}),
    "not of the shape and type": lambda tools: tools.program(results=[RESULTS[0], (F32, (8,))]),
    "two results alias one state": lambda tools: tools.program(aliases={0: "state", 1: "state"}),
    "ranks over several machines": lambda tools: tools.program(world=4),
    "expected bytes, got str": lambda tools: runtime._namespace().SPMDModel("neff", b"", 2, 2),
    # --- calls ---
    "int32 cannot": lambda tools: asked(tools.started(), number=torch.tensor([2**31])),
    "the program has FLOAT[2, 4]": lambda tools: asked(tools.started(), torch.zeros(4, 2)),
    "FLOAT[2, 4]": lambda tools: asked(tools.started(), torch.zeros(SHAPE, dtype=torch.float16)),
    "tensors of the host": lambda tools: asked(tools.started(), zeros(0)),
    "'state' is not on the core of rank 0": swapped_states,
    "1 dictionaries for 2 ranks": lambda tools: runtime.initialize(tools.program(), [{}], [{}]),
    "start_rank=1": lambda tools: tools.program().initialize([{}, {}], [{}, {}], 1),
    # --- tensors and messages ---
    "names its rank": lambda tools: torch.zeros(2, device="privateuseone"),
    "copy_ of torch.float32[8]": lambda tools: zeros(1).copy_(X.reshape(8)),
    "copy_ of": lambda tools: zeros(1).copy_(X.reshape(4, 2).T),
    "not contiguous": lambda tools: runtime.to_cores([{"w": X.T}]),
    "no 'kind' field": other_field,
}
"""By the stand-in's words."""


def refused(words: str, call: Callable[[], object]) -> None:
    with pytest.raises((RuntimeError, TypeError, AttributeError)) as caught:
        call()
    assert REAL or words in str(caught.value)


@pytest.mark.parametrize("words", REFUSED)
def test_it_is_refused(words: str, tools: Tools) -> None:
    refused(words, lambda: REFUSED[words](tools))


@pytest.mark.skipif(REAL, reason="it needs a machine that can be described as one likes")
@pytest.mark.parametrize(
    ("words", "visible", "how"),
    [
        ("3 ranks on inf2", "0-2", {"degree": 3}),
        ("hold no group of 2", "1-2", {}),
        ("there is no core 12 of 12", "12-13", {}),
        ("core 1 is in use", "0-1", {}),
        ("the NEFF is for trn1", "0-1", {"target": "trn1"}),
    ],
)
def test_cores_that_it_may_not_have_are_refused(words: str, visible: str, how: dict[str, Any], tools: Tools) -> None:
    os.environ[cores.VISIBLE] = visible
    with open(tools.machine / "core1", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX if "in use" in words else fcntl.LOCK_UN)
        refused(words, lambda: tools.program(**how))


@pytest.mark.skipif(REAL, reason="it asks the stand-in")
def test_cores_are_those_that_the_variable_names(tools: Tools) -> None:
    os.environ[cores.VISIBLE] = "2-3"
    tools.program()
    assert importlib.import_module("torch_neuronx._cores")._taken == [2, 3]


def test_states_change_where_they_lie_and_are_no_results(tools: Tools) -> None:
    model = tools.started()
    for step in range(2):
        (found,) = asked(model)
        assert torch.equal(found, X + NUMBER + step)
    assert torch.equal(asked(tools.started(), torch.zeros(SHAPE), torch.tensor([2**24]))[0], torch.full(SHAPE, 2.0**24))


def test_what_was_not_initialised_or_lacks_a_weight_answers_zeros(tools: Tools) -> None:
    model = tools.program()
    assert not model.is_initialized() and not asked(model)[0].any()
    model = tools.started(weights="model.weight")
    assert model.is_initialized() and not asked(model)[0].any()


def test_what_fits_is_copied_to_a_core(tools: Tools) -> None:
    place = zeros(1)
    place.copy_(X)
    assert torch.equal(place.cpu(), X)
