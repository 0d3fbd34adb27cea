"""Checks that every backend makes: of a graph when it is loaded, and of the tensors that the graph is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nxd_infer.artifact.manifest import TensorSpec
from nxd_infer.backends.base import RankGraph, RankRuntime
from nxd_infer.errors import ArtifactCorruptError, InputMismatchError
from nxd_infer.graph.stored import GraphFile, read_graph
from nxd_infer.util.dtypes import dtype_name


def mismatch(spec: TensorSpec, tensor: Any, *, stride: bool = True) -> str:
    """Return how ``tensor`` differs from ``spec``, as text; "" if it does not.

    Compiled code checks none of this: with another shape or stride it silently returns wrong numbers.
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


class InputChecks:
    """Checks the inputs of a graph; the specs are converted once, because a decode step takes few milliseconds."""

    def __init__(self, graph: GraphFile):
        self._checks = [(spec, spec.torch_dtype, torch.Size(spec.shape)) for spec in graph.inputs]

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return ``inputs``, made contiguous. Raises InputMismatchError for another count, dtype or shape."""
        if len(inputs) != len(self._checks):
            raise InputMismatchError(f"{len(inputs)} inputs, the graph takes {len(self._checks)}")
        for tensor, (spec, dtype, shape) in zip(inputs, self._checks, strict=True):
            if not isinstance(tensor, Tensor) or tensor.dtype is not dtype or tensor.shape != shape:
                raise InputMismatchError(f"input {spec.name!r} {mismatch(spec, tensor, stride=False)}")
        return [tensor.contiguous() for tensor in inputs]


def checked_tensors(specs: Sequence[TensorSpec], tensors: Mapping[str, Tensor], what: str, error: type) -> list[Tensor]:
    """Return the tensors that ``specs`` describe, in their order. Raises ``error`` if one is missing or differs."""
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
    """Read the graph of ``rank`` and register the operator libraries that it calls.

    Raises ArtifactCorruptError if it is not the graph that the manifest describes.
    """
    graph = read_graph(rank.directory, rank.spec.digest)
    expected = graph.spec()
    if (expected.states, expected.weights) != (rank.spec.states, rank.spec.weights):
        raise ArtifactCorruptError(f"graph {rank.spec.digest} takes other states or weights than the manifest says")
    for content_hash in graph.ops:
        runtime.library(content_hash)
    return graph
