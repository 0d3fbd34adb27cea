"""One bucket's graph on all ranks, as far as devices have it in common: the host's parts, and what the body takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from nxd_infer.artifact.manifest import TensorSpec
from nxd_infer.backends.base import RankGraph, RankRuntime
from nxd_infer.backends.checks import InputChecks, checked_graph, checked_tensors
from nxd_infer.backends.hlo.files import HLO_TABLE, PARTS_FILE, HloFile, PartsFile, read
from nxd_infer.backends.hlo.host import HostParts
from nxd_infer.backends.hlo.parts import rank_name
from nxd_infer.backends.hlo.placement import Cell
from nxd_infer.context import make_context
from nxd_infer.errors import ArtifactCorruptError, InputMismatchError, ModelClosedError, WeightSchemaError


class HloExecutable:
    """See ``backends.Executable``. A backend's own says how the body runs (:meth:`run_body`)."""

    def __init__(self, ranks: Sequence[RankGraph], runtime: RankRuntime, cell: type[Cell] = Cell):
        self.graph = checked_graph(ranks[0], runtime)
        if others := {rank.spec.digest for rank in ranks} - {self.graph.digest}:
            raise ArtifactCorruptError(
                f"the ranks run other graphs than {self.graph.digest} ({min(others)}): this backend runs one on all"
            )
        directory = ranks[0].directory
        self.parts = read(directory, PARTS_FILE, PartsFile)
        self.table = read(directory, HLO_TABLE, HloFile)
        self._host = HostParts(directory, self.graph, self.parts)
        self._checked = InputChecks(self.graph)
        self._states: Mapping[str, Cell] = ranks[0].states
        self.ranks = [self._take(number, rank, len(ranks), cell) for number, rank in enumerate(ranks)]
        """What the body takes of each rank, by the names of ``parts.json``: its number, states and weights."""
        self._closed = False

    def run_body(self, known: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Run the body on all ranks; its states take their new values. ``known`` has what it takes of the host by name,
        and the result what the host fetches of the first rank."""
        raise NotImplementedError

    def fetched(self, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the host fetches of the body's ``results`` on one rank, by name."""
        shapes = {spec.name: spec.shape for spec in self.table.results}
        return {name: results[name].cpu().reshape(shapes[name]) for name in self.parts.fetched}

    def _take(self, number: int, rank: RankGraph, degree: int, cell: type[Cell]) -> dict[str, Cell]:
        states = _checked(self.graph.states, rank.states, "state", InputMismatchError)
        weights = _checked(self.graph.weights, rank.weights, "weight", WeightSchemaError)
        first = len(states) + len(self.graph.inputs)
        given = [*zip(self.parts.given, states, strict=False), *zip(self.parts.given[first:], weights, strict=True)]
        context = make_context(degree, number, tp=degree)
        return {
            **{rank_name(axis): cell(torch.tensor([context.axis(axis).rank])) for axis in self.parts.ranks},
            **{name: held for name, held in given if name in self.parts.body.takes},
        }

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return self.bind(inputs)()

    def bind(self, inputs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        ready = self._checked(inputs)

        def run() -> list[Tensor]:
            if self._closed:
                raise ModelClosedError(f"graph {self.graph.digest} was closed")
            return self._host.run(self._states, ready, self.run_body)

        return run

    def update_weights(self, weights: Mapping[str, Tensor], rank: int = 0) -> None:
        specs = {spec.name: spec for spec in self.graph.weights}
        unknown = [name for name in weights if name not in specs]
        if unknown:
            raise WeightSchemaError(f"the graph reads no weight {unknown[0]!r}")
        checked_tensors([specs[name] for name in weights], weights, "weight", WeightSchemaError)
        first = len(self.graph.states) + len(self.graph.inputs)
        for name, tensor in weights.items():
            self.ranks[rank][self.parts.given[first + list(specs).index(name)]].put(tensor)

    def close(self) -> None:
        self._closed = True
        self._states, self.ranks = {}, []


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
