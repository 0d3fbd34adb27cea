"""A loaded graph on the CPU: states and weights are checked once, inputs at every call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from nxd_infer.backends.checks import InputChecks, checked_tensors
from nxd_infer.backends.cpu.packing import encoded_spec
from nxd_infer.backends.cpu.program import Runs
from nxd_infer.errors import InputMismatchError, ModelClosedError, WeightSchemaError
from nxd_infer.graph.stored import GraphFile


class CpuExecutable:
    """See ``backends.Executable``."""

    def __init__(self, graph: GraphFile, states: Mapping[str, Any], weights: Mapping[str, Any], program: Runs):
        self.graph = graph
        self._program: Runs | None = program
        self._states = checked_tensors(graph.states, states, "state", InputMismatchError)
        self._specs = [encoded_spec(spec, spec.encoding) for spec in graph.weights]
        self._weights = checked_tensors(self._specs, weights, "weight", WeightSchemaError)
        self._checked = InputChecks(graph)
        program.hold(self._states, self._weights)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return self.bind(inputs)()

    def bind(self, inputs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        ready = self._checked(inputs)

        def run() -> list[Tensor]:
            return self._open().run(ready)

        return run

    def update_weights(self, weights: Mapping[str, Tensor], rank: int = 0) -> None:
        program = self._open()
        current = {spec.name: tensor for spec, tensor in zip(self._specs, self._weights, strict=True)}
        if unknown := [name for name in weights if name not in current]:
            raise WeightSchemaError(f"the graph reads no weight {unknown[0]!r}")
        self._weights = checked_tensors(self._specs, {**current, **weights}, "weight", WeightSchemaError)
        program.hold(self._states, self._weights)

    def _open(self) -> Runs:
        if self._program is None:
            raise ModelClosedError(f"graph {self.graph.digest} was closed")
        return self._program

    def close(self) -> None:
        self._program = None
        self._states, self._weights = [], []
