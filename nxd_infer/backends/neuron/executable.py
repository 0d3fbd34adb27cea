"""One bucket's graph on all NeuronCores of a model: the host's parts here, the body as a program of the runtime's.

States and weights keep their memory on a core: new values are copied into it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nxd_infer.backends.base import RankGraph, RankRuntime
from nxd_infer.backends.hlo.executable import HloExecutable
from nxd_infer.backends.hlo.files import Value
from nxd_infer.backends.hlo.parts import TOKEN
from nxd_infer.backends.hlo.placement import Cell, as_parameter
from nxd_infer.backends.neuron import runtime
from nxd_infer.backends.neuron.compiler import NEFF
from nxd_infer.backends.neuron.lower import aliases_of
from nxd_infer.errors import ArtifactCorruptError, BackendUnavailableError, InputMismatchError
from nxd_infer.util.dtypes import dtype_of

PROBE = "NXD_INFER_NEURON_PROBE"
"""``0`` leaves out the probe after loading, for a model that answers with zeros by its nature."""


class CoreCell(Cell):
    """A tensor that lives on the host until it is loaded, and in one place on a core then."""

    on_core = False

    def put(self, tensor: Tensor) -> None:
        if self.on_core:
            self.value.copy_(tensor.reshape(self.value.shape).contiguous())
        else:
            self.value = tensor

    def on_host(self) -> Tensor:
        return self.value.cpu().reshape(self.shape) if self.on_core else self.value

    def live_in(self, tensor: Tensor) -> None:
        self.value, self.on_core = tensor, True


class NeuronExecutable(HloExecutable):
    """Loading allocates the program's buffers and runs it once; its states are as they were afterwards."""

    def __init__(self, ranks: Sequence[RankGraph], runtime_: RankRuntime):
        super().__init__(ranks, runtime_, CoreCell)
        file = ranks[0].directory / NEFF
        try:
            neff = file.read_bytes()
        except OSError as error:
            raise ArtifactCorruptError(f"{file} cannot be read: {error}; trace again") from error
        self._aliases = aliases_of(self.graph, self.parts, self.table)
        first = len(self.graph.states)
        self._state_names = dict(zip(self.parts.given, (spec.name for spec in self.graph.states), strict=False))
        weights = zip(self.parts.given[first + len(self.graph.inputs) :], self.graph.weights, strict=True)
        inputs = zip(self.parts.given[first:], self.graph.inputs, strict=False)
        self._input_names = {given: spec.name for given, spec in inputs}
        self._weight_names = {given: spec.name for given, spec in weights}
        for rank in self.ranks:
            rank[TOKEN] = CoreCell(torch.zeros(()))
        taken = [self._taken(spec) for spec in self.table.parameters]
        self._inputs = [spec.name for spec, each in zip(self.table.parameters, taken, strict=True) if each.kind == _IN]
        self._results = [spec for number, spec in enumerate(self.parts.results) if number not in self._aliases]
        given = [(dtype_of(spec.dtype), spec.device_shape) for spec in self.parts.results]
        self._program: Any = runtime.program(neff, runtime.metaneff(taken, given, self._aliases), len(ranks))
        self._place(taken)
        if os.environ.get(PROBE) != "0":
            self._probe()

    def _taken(self, spec: Value) -> runtime.Taken:
        dtype, shape = dtype_of(spec.dtype), spec.shape if spec.name == TOKEN else spec.device_shape
        if spec.name in self._state_names:
            return runtime.Taken(_STATE, self._state_names[spec.name], dtype, shape)
        if spec.name in self.ranks[0]:
            return runtime.Taken(_WEIGHT, self._weight_names.get(spec.name, spec.name), dtype, shape)
        return runtime.Taken(_IN, spec.name, dtype, shape)

    def _place(self, taken: Sequence[runtime.Taken]) -> None:
        """Have on the cores what the program takes, and give it that."""
        names = [spec.name for spec in self.table.parameters]
        states = {each.key: name for name, each in zip(names, taken, strict=True) if each.kind == _STATE}
        weights = {each.key: name for name, each in zip(names, taken, strict=True) if each.kind == _WEIGHT}
        for number, rank in enumerate(self.ranks):
            _load_states(number, [rank[name] for name in states.values()])
        held = [{key: rank[name] for key, name in weights.items()} for rank in self.ranks]
        _load_weights(held, {each.key: each.shape for each in taken})
        runtime.initialize(
            self._program,
            [{key: rank[name].value for key, name in states.items()} for rank in self.ranks],
            [{key: cell.value for key, cell in rank.items()} for rank in held],
        )

    def run_body(self, known: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        inputs = [_fitting(self._input_names.get(name, name), as_parameter(known[name])) for name in self._inputs]
        results = runtime.forward(self._program, inputs)
        return self.fetched({spec.name: value for spec, value in zip(self._results, results, strict=True)})

    def _probe(self) -> None:
        """A program whose weights did not arrive answers with zeros and no error."""
        weighed = any(name in self._weight_names for name in self.ranks[0])
        kept = [(cell, cell.on_host().clone()) for rank in self.ranks for cell in self._cells(rank)]
        sizes = {spec.name: spec for spec in self.table.parameters}
        results = self.run_body({name: _trial(sizes[name]) for name in self._inputs}).values()
        for cell, value in kept:
            cell.put(value)
        numbers = [value for value in results if value.is_floating_point()]
        if weighed and numbers and not any(value.count_nonzero() for value in numbers):
            raise BackendUnavailableError(
                f"the graph {self.graph.digest} answers a probe with zeros alone, as the Neuron runtime does where its "
                f"weights did not arrive: load the model again, or set {PROBE}=0 if zeros are right for inputs of 1"
            )

    def _cells(self, rank: Mapping[str, Cell]) -> list[Cell]:
        return [cell for name, cell in rank.items() if name in self._state_names]

    def close(self) -> None:
        super().close()
        self._program = None  # nothing else gives its buffers back


_IN, _STATE, _WEIGHT = "USER_INPUT", "INPUT_STATE", "INPUT_WEIGHT"
LARGEST = 2**31 - 1
"""As which a core computes int64."""


def _load_weights(ranks: Sequence[Mapping[str, Any]], shapes: Mapping[str, Sequence[int]]) -> None:
    """Copy to the cores what is not there yet of these cells, which are the same ones for every rank; ``shapes`` are
    those that the program takes them in."""
    missing = [name for name, cell in ranks[0].items() if not cell.on_core]
    if missing:
        host = [{name: rank[name].value.reshape(shapes[name]).contiguous() for name in missing} for rank in ranks]
        for loaded, rank in zip(runtime.to_cores(host), ranks, strict=True):
            for name in missing:
                rank[name].live_in(loaded[name])


def _load_states(rank: int, cells: Iterable[Any]) -> None:
    """Give states memory on the core of ``rank``, with the values that they have here."""
    for cell in cells:
        if not cell.on_core:
            first = as_parameter(cell.value)
            cell.live_in(runtime.zeros(first.shape, first.dtype, rank))
            cell.put(first)


def _trial(spec: Value) -> Tensor:
    """Whole numbers of 0, which are places that there are, and others of 1."""
    dtype = dtype_of(spec.dtype)
    return torch.full(spec.shape, 1 if dtype.is_floating_point or dtype == torch.bool else 0, dtype=dtype)


def _fitting(name: str, value: Tensor) -> Tensor:
    """The core computes int64 in 32 bits. Raises InputMismatchError for a value that would be another one there."""
    if value.dtype == torch.int64 and value.numel():
        low, high = map(int, value.aminmax())
        if low < -LARGEST - 1 or high > LARGEST:
            raise InputMismatchError(
                f"input {name!r} holds the number {high if high > LARGEST else low}, and a NeuronCore computes int64 "
                "in 32 bits: keep it within them"
            )
    return value.contiguous()
