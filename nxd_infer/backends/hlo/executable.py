"""One bucket's graph on all ranks, as far as devices have it in common: the head, which the host runs before the body,
the tail after it, the states that both keep, and what the body takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from nxd_infer.backends.base import RankGraph, RankRuntime
from nxd_infer.backends.checks import InputChecks, checked_graph
from nxd_infer.backends.hlo.files import (
    HEAD_FILE,
    HLO_TABLE,
    PARTS_FILE,
    TAIL_FILE,
    HloFile,
    PartFile,
    PartsFile,
    read,
)
from nxd_infer.backends.hlo.parts import rank_name
from nxd_infer.backends.hlo.placement import Cell
from nxd_infer.context import make_context
from nxd_infer.errors import ArtifactCorruptError, ModelClosedError
from nxd_infer.graph.ir import Program
from nxd_infer.graph.stored import read_ir


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
        self._head, self._tail = (Program(read_ir(directory, name)) for name in (HEAD_FILE, TAIL_FILE))
        stored = zip(self.graph.states, self.parts.given, self.parts.new_states, strict=False)
        self._host_states = [
            (spec.name, given, new) for spec, given, new in stored if given not in self.parts.body.takes
        ]
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
        shapes = {spec.name: spec.shape for spec in self.parts.results}
        return {name: results[name].cpu().reshape(shapes[name]) for name in self.parts.fetched}

    def _take(self, number: int, rank: RankGraph, degree: int, cell: type[Cell]) -> dict[str, Cell]:
        states = [rank.states[spec.name] for spec in self.graph.states]
        weights = [rank.weights[spec.name] for spec in self.graph.weights]
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
            return self._run(ready)

        return run

    def _run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        known = dict(zip(self.parts.given[len(self.graph.states) :], inputs, strict=False))
        known.update((given, self._states[name].value) for name, given, _ in self._host_states)
        with torch.no_grad():
            known.update(_results(self._head, self.parts.head, known))
            known.update(self.run_body(known))
            known.update(_results(self._tail, self.parts.tail, known))
        for name, _, new in self._host_states:
            self._states[name].value = known[new]
        return [known[name] for name in self.parts.outputs]

    def update_weights(self, weights: Mapping[str, Tensor], rank: int = 0) -> None:
        """Nothing is left to do: calls look into the cells, in which ``DevicePlacement`` has replaced them."""

    def close(self) -> None:
        self._closed = True
        self._states, self.ranks = {}, []


def _results(program: Program, part: PartFile, known: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
    return zip(part.gives, program(*[known[name] for name in part.takes]), strict=True)
