"""The graphs of one rank, or of one of its pipeline stages, and the modules that they were traced from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from nxd_infer.artifact.manifest import TensorSpec, WeightSpec
from nxd_infer.graph.stored import Lowered
from nxd_infer.layout.shard import named_tensors
from nxd_infer.trace.request import TracedBucket


@dataclass
class Built:
    """The user's module for one bucket, and its declared states."""

    module: nn.Module
    aliases: dict[int, str]
    states: list[str]
    overlaps: dict[str, str]
    """Tensors that shared memory when ``func`` returned them; later code stores each separately."""


@dataclass
class RankGraphs:
    """All buckets of one rank, lowered, with the tables they share."""

    built: list[Built]
    constants: list[dict[str, Tensor]]
    """Each bucket's weights that are neither parameters nor buffers."""
    ir: list[dict[str, Any]] = field(default_factory=list)
    """The canonical graphs."""
    lowered: list[Lowered] = field(default_factory=list)
    buckets: list[TracedBucket] = field(default_factory=list)
    states: dict[str, TensorSpec] = field(default_factory=dict)
    weights: dict[str, WeightSpec] = field(default_factory=dict)
    stage: int = 0
    """Pipeline stage."""
    origin: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Weight -> the bucket whose module (or constants) holds it, and its name there."""
    _tensors: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def tensors(self, index: int) -> dict[str, Tensor]:
        """Return parameters and buffers of a bucket's module, by every name; buckets may share one module."""
        module = self.built[index].module
        if id(module) not in self._tensors:
            self._tensors[id(module)] = named_tensors(module)
        return self._tensors[id(module)]


def is_symbolic(tensor: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return tensor.is_meta or isinstance(tensor, FakeTensor)


def value_of(graphs: RankGraphs, index: int, name: str) -> Tensor:
    """Return the tensor ``name`` of a bucket's module (or its constants); fake if it was built fake."""
    constants = graphs.constants[index]
    if name in constants:
        return constants[name]
    return graphs.tensors(index)[name].detach()
