"""One bucket's graph on all ranks: the host's parts here, the body on every replica, from its HLO."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nxd_infer.artifact.manifest import TensorSpec, dtype_of
from nxd_infer.backends.base import RankGraph, RankRuntime
from nxd_infer.backends.checks import InputChecks, checked_graph, checked_tensors
from nxd_infer.backends.hlo import xla_api as xla
from nxd_infer.backends.hlo.files import HLO_FILE, HLO_TABLE, PARTS_FILE, HloFile, PartsFile, Value, read
from nxd_infer.backends.hlo.host import HostParts
from nxd_infer.backends.hlo.parts import TOKEN, rank_name
from nxd_infer.backends.xla.placement import Cell, as_parameter
from nxd_infer.backends.xla.replicas import Replicas
from nxd_infer.context import make_context
from nxd_infer.errors import ArtifactCorruptError, InputMismatchError, ModelClosedError, WeightSchemaError


class XlaExecutable:
    """See ``backends.Executable``. Loading runs the body once, on zeros and for nothing: XLA compiles it then."""

    def __init__(self, ranks: Sequence[RankGraph], runtime: RankRuntime, replicas: Replicas):
        self.graph = checked_graph(ranks[0], runtime)
        if others := {rank.spec.digest for rank in ranks} - {self.graph.digest}:
            raise ArtifactCorruptError(
                f"the ranks run other graphs than {self.graph.digest} ({min(others)}): the xla backend runs one on all"
            )
        directory = ranks[0].directory
        self._parts = read(directory, PARTS_FILE, PartsFile)
        self._table = read(directory, HLO_TABLE, HloFile)
        self._host = HostParts(directory, self.graph, self._parts)
        self._checked = InputChecks(self.graph)
        self._replicas = replicas
        self._states: Mapping[str, Cell] = ranks[0].states
        self._ranks = [self._take(number, rank) for number, rank in enumerate(ranks)]
        try:
            self._program: Any = xla.computation(self.graph.digest, (directory / HLO_FILE).read_bytes())
        except (OSError, RuntimeError) as error:
            raise ArtifactCorruptError(f"{directory / HLO_FILE} cannot be read as HLO: {error}") from error
        self._new_states = [
            (given, new)
            for given, new in zip(self._parts.given, self._parts.new_states, strict=False)
            if new in self._parts.body.gives
        ]
        self._on_devices(self._zeros(), keep=False)

    def _take(self, number: int, rank: RankGraph) -> dict[str, Cell]:
        """What the body takes of one rank, by the names of ``parts.json``: its number, states and weights."""
        states = _checked(self.graph.states, rank.states, "state", InputMismatchError)
        weights = _checked(self.graph.weights, rank.weights, "weight", WeightSchemaError)
        first = len(states) + len(self.graph.inputs)
        given = [*zip(self._parts.given, states, strict=False), *zip(self._parts.given[first:], weights, strict=True)]
        context = make_context(self._replicas.degree, number, tp=self._replicas.degree)
        return {
            **{rank_name(axis): Cell(torch.tensor([context.axis(axis).rank])) for axis in self._parts.ranks},
            **{name: cell for name, cell in given if name in self._parts.body.takes},
        }

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return self.bind(inputs)()

    def bind(self, inputs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        ready = self._checked(inputs)

        def run() -> list[Tensor]:
            if self._program is None:
                raise ModelClosedError(f"graph {self.graph.digest} was closed")
            return self._host.run(self._states, ready, self._on_devices)

        return run

    def _on_devices(self, known: Mapping[str, Tensor], keep: bool = True) -> Mapping[str, Tensor]:
        return self._replicas.run(lambda rank: self._on_replica(rank, known, keep))[0]

    def _on_replica(self, rank: int, known: Mapping[str, Tensor], keep: bool) -> Mapping[str, Tensor]:
        """Run the body on this thread's device. ``keep``: its states take their new values. Returns, of the first
        rank, what the host fetches."""
        own = self._ranks[rank]
        for cell in own.values():
            cell.move_to(self._replicas.devices[rank])
        arguments = [
            own[spec.name].value if spec.name in own else _argument(spec, known, self._replicas.devices[rank])
            for spec in self._table.parameters
        ]
        results = dict(zip(self._parts.body.gives, xla.record(self._program, arguments), strict=True))
        self._replicas.step()
        if keep:
            for given, new in self._new_states:
                own[given].value = results[new]
        if rank != 0:
            return {}
        shapes = {spec.name: spec.shape for spec in self._table.results}
        return {name: results[name].cpu().reshape(shapes[name]) for name in self._parts.fetched}

    def _zeros(self) -> dict[str, Tensor]:
        """What the body takes besides what is kept."""
        given = [spec for spec in self._parts.specs if spec.name not in self._ranks[0]]
        return {spec.name: torch.zeros(spec.shape, dtype=dtype_of(spec.dtype)) for spec in given}

    def update_weights(self, weights: Mapping[str, Tensor], rank: int = 0) -> None:
        specs = {spec.name: spec for spec in self.graph.weights}
        unknown = [name for name in weights if name not in specs]
        if unknown:
            raise WeightSchemaError(f"the graph reads no weight {unknown[0]!r}")
        checked_tensors([specs[name] for name in weights], weights, "weight", WeightSchemaError)
        first = len(self.graph.states) + len(self.graph.inputs)
        for name, tensor in weights.items():
            self._ranks[rank][self._parts.given[first + list(specs).index(name)]].put(tensor)

    def close(self) -> None:
        self._program = None
        self._states, self._ranks = {}, []


def _checked(specs: Sequence[TensorSpec], cells: Mapping[str, Cell], what: str, error: type) -> list[Cell]:
    """The cells that ``specs`` describe, in their order. Raises ``error`` for one that is missing or another one."""
    for spec in specs:
        found = cells.get(spec.name)
        if found is None:
            raise error(f"the {what} {spec.name!r} is missing")
        if (found.dtype, list(found.shape)) != (spec.torch_dtype, spec.shape):
            raise error(
                f"the {what} {spec.name!r} is {found.dtype}{list(found.shape)}, traced as {spec.dtype}{spec.shape}"
            )
    return [cells[spec.name] for spec in specs]


def _argument(spec: Value, known: Mapping[str, Tensor], device: str) -> Tensor:
    """A parameter that is not kept on the device."""
    return torch.zeros((), device=device) if spec.name == TOKEN else as_parameter(known[spec.name]).to(device)
