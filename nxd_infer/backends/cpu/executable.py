"""What the executables of the CPU backends share: they check states and weights once, and inputs at every call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nxd_infer.artifact.manifest import TensorSpec, dtype_name
from nxd_infer.backends.base import RankGraph, RankRuntime
from nxd_infer.backends.cpu.packing import encoded_spec
from nxd_infer.errors import ArtifactCorruptError, InputMismatchError, ModelClosedError, WeightSchemaError
from nxd_infer.graph.stored import GraphFile, read_graph


def mismatch(spec: TensorSpec, tensor: Any, *, stride: bool = True) -> str:
    """How ``tensor`` differs from ``spec``, as text; empty if it does not.

    Compilers check none of this: a tensor of another shape or stride gives wrong numbers and no error.
    """
    if not isinstance(tensor, Tensor):
        return f"is {type(tensor).__name__}, not a tensor"
    if tensor.dtype != spec.torch_dtype:
        return f"has dtype {dtype_name(tensor.dtype)}, traced as {spec.dtype}"
    if list(tensor.shape) != spec.shape:
        return f"has shape {list(tensor.shape)}, traced as {spec.shape}"
    if tensor.device.type != "cpu":
        return f"is on {tensor.device}, traced on cpu"
    strides = zip(tensor.stride(), spec.stride, spec.shape, strict=True)
    if stride and tensor.numel() and any(found != wanted for found, wanted, size in strides if size != 1):
        return f"has stride {list(tensor.stride())}, traced as {spec.stride}"
    return ""


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
        self._states = _take(graph.states, states, "state", InputMismatchError)
        self._specs = [encoded_spec(spec, spec.encoding) for spec in graph.weights]
        self._weights = _take(self._specs, weights, "weight", WeightSchemaError)
        self._checks = [(spec, spec.torch_dtype, torch.Size(spec.shape)) for spec in graph.inputs]

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

    def _checked(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        if len(inputs) != len(self._checks):
            raise InputMismatchError(f"{len(inputs)} inputs, the graph takes {len(self._checks)}")
        for tensor, (spec, dtype, shape) in zip(inputs, self._checks, strict=True):
            if not isinstance(tensor, Tensor) or tensor.dtype is not dtype or tensor.shape != shape:
                raise InputMismatchError(f"input {spec.name!r} {mismatch(spec, tensor, stride=False)}")
        return [tensor.contiguous() for tensor in inputs]

    def update_weights(self, weights: Mapping[str, Tensor], rank: int = 0) -> None:
        names = {weight.name for weight in self.graph.weights}
        unknown = [name for name in weights if name not in names]
        if unknown:
            raise WeightSchemaError(f"the graph reads no weight {unknown[0]!r}")
        current = dict(zip((w.name for w in self.graph.weights), self._weights, strict=True))
        self._weights = _take(self._specs, {**current, **weights}, "weight", WeightSchemaError)

    def close(self) -> None:
        self._run = None
        self._states, self._weights = [], []


def _take(specs: Sequence[TensorSpec], tensors: Mapping[str, Tensor], what: str, error: type) -> list[Tensor]:
    taken = []
    for spec in specs:
        if spec.name not in tensors:
            raise error(f"the {what} {spec.name!r} is missing")
        problem = mismatch(spec, tensors[spec.name])
        if problem:
            raise error(f"the {what} {spec.name!r} {problem}")
        taken.append(tensors[spec.name])
    return taken


def checked_graph(rank: RankGraph, runtime: RankRuntime) -> GraphFile:
    """Load the graph that the manifest describes and register its operator libraries. Raises ArtifactCorruptError."""
    graph = read_graph(rank.directory, rank.spec.digest)
    expected = graph.spec()
    if (expected.states, expected.weights) != (rank.spec.states, rank.spec.weights):
        raise ArtifactCorruptError(f"graph {rank.spec.digest} takes other states or weights than the manifest says")
    for content_hash in graph.ops:
        runtime.library(content_hash)
    return graph
