"""torch_neuronx, the real one or the stand-in, keeps what is relied on beyond its signatures."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nxd_infer.backends.base import WORDS
from nxd_infer.backends.neuron import compiler, cores, runtime
from nxd_infer.backends.neuron.runtime import Taken
from tests.support.neuron.hlo_samples import lowered
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
X, NUMBER = torch.arange(8.0).reshape(SHAPE), torch.tensor([3])


class Program:
    """``x @ weight + state + number`` on two cores; the state grows by one."""

    def __init__(self, folder: Path):
        shapes = [(str(spec.dtype).removeprefix("torch."), list(spec.shape)) for spec in SPECS.values()]
        context, order = lowered(
            lambda x, number, state, weight: (x @ weight + state + number, state + 1), shapes, "adds"
        )
        (folder / compiler.INPUT).write_bytes(context.hlo())
        compiler.compile_here(folder, {"target": TARGET, WORDS: []})
        self._neff = (folder / compiler.NEFF).read_bytes()
        self._names = [[*SPECS][place] for place in order]
        taken = [SPECS[name] for name in self._names]
        self._metaneff = runtime.metaneff(taken, [(F32, SHAPE), (F32, SHAPE)], {1: self._names.index("state")})

    def loaded(self) -> Any:
        return runtime.program(self._neff, self._metaneff, 2)

    def started(self, weight: str = "weight") -> Any:
        model = self.loaded()
        weights = runtime.to_cores([{weight: torch.eye(4)} for _ in range(2)])
        runtime.initialize(model, [{"state": zeros(rank)} for rank in range(2)], weights)
        return model

    def run(self, model: Any, x: Tensor = X, number: Tensor = NUMBER) -> Tensor:
        inputs = {"x": x, "number": number}
        (result,) = runtime.forward(model, [inputs[name] for name in self._names if name in inputs])
        return result.cpu()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    """On a machine of which this process has taken no core yet."""
    with neuron_machine(tmp_path / "machine", "inf2.24xlarge", 6):
        runtime.load()
        if REAL:
            cores.claim(2)
        else:
            os.environ[cores.VISIBLE] = "0-1"
            give_back()
        yield Program(tmp_path)
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


def test_states_change_where_they_lie_and_are_no_results(program: Program) -> None:
    model = program.started()
    for step in range(2):
        assert torch.equal(program.run(model), X + NUMBER + step)
    large = program.run(program.started(), torch.zeros(SHAPE), torch.tensor([2**24]))
    assert torch.equal(large, torch.full(SHAPE, 2.0**24))


def test_what_was_not_initialised_or_lacks_a_weight_answers_zeros(program: Program) -> None:
    model = program.loaded()
    assert not model.is_initialized() and not program.run(model).any()
    model = program.started(weight="model.weight")
    assert model.is_initialized() and not program.run(model).any()


@pytest.mark.usefixtures("program")
def test_what_fits_is_copied_to_a_core() -> None:
    place = zeros(1)
    place.copy_(X)
    assert torch.equal(place.cpu(), X)
