"""What the executables of the CPU backends share: they check states and weights once, and inputs at every call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from nxd_infer.backends.checks import InputChecks, checked_tensors
from nxd_infer.backends.cpu.packing import encoded_spec
from nxd_infer.errors import InputMismatchError, ModelClosedError, WeightSchemaError
from nxd_infer.graph.stored import GraphFile


class CpuExecutable:
    """A loaded graph; ``run`` takes states, inputs and weights in one list."""

    def __init__(
        self,
        graph: GraphFile,
        states: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        run: Callable[[list[Tensor]], Sequence[Tensor]],
    ):
        self.graph = graph
        self._run: Callable[[list[Tensor]], Sequence[Tensor]] | None = run
        self._states = checked_tensors(graph.states, states, "state", InputMismatchError)
        self._specs = [encoded_spec(spec, spec.encoding) for spec in graph.weights]
        self._weights = checked_tensors(self._specs, weights, "weight", WeightSchemaError)
        self._checked = InputChecks(graph)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return self.bind(inputs)()

    def bind(self, inputs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        ready = self._checked(inputs)

        def run() -> list[Tensor]:
            if self._run is None:
                raise ModelClosedError(f"graph {self.graph.digest} was closed")
            with torch.no_grad():
                return list(self._run([*self._states, *ready, *self._weights]))

        return run

    def update_weights(self, weights: Mapping[str, Tensor], rank: int = 0) -> None:
        names = {weight.name for weight in self.graph.weights}
        unknown = [name for name in weights if name not in names]
        if unknown:
            raise WeightSchemaError(f"the graph reads no weight {unknown[0]!r}")
        current = dict(zip((w.name for w in self.graph.weights), self._weights, strict=True))
        self._weights = checked_tensors(self._specs, {**current, **weights}, "weight", WeightSchemaError)

    def close(self) -> None:
        self._run = None
        self._states, self._weights = [], []
