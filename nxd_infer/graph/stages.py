"""Split a canonical graph into the stages of a pipeline: one graph per stage, with the states and weights that it uses.

The stages of the model's modules are given, by the names of their weights; everything else follows from the data flow.
A node belongs to the last of the stages that what it needs comes from. A state lives in one stage: that of the last
node that reads or writes it. Nodes that need nothing but inputs (positions, masks) are computed by every stage that
uses them. A value that a later stage needs is *handed* to it: an output of one graph, and a further input of others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from nxd_infer.artifact.manifest import InputSpec, OutputSpec, StageSpec, TensorSpec
from nxd_infer.errors import TraceError
from nxd_infer.graph.canonical import Graph, propagate
from nxd_infer.graph.flow import Flow, collective
from nxd_infer.graph.passes import Nodes, aten, call, collective_sequence, output_of, written
from nxd_infer.graph.stored import GraphFile

HANDED = "handed:"
"""What the names of handed values begin with."""


@dataclass(frozen=True)
class StagedGraph:
    """One graph per stage, and what they hand one another."""

    graphs: list[Graph]
    """Each takes its states, all inputs, what it is handed, and its weights."""
    stages: list[StageSpec]
    handed: list[TensorSpec]


def split_stages(graph: Graph, stage_of: Callable[[str], int | None], count: int) -> StagedGraph:
    """Split ``graph`` into ``count`` stages. ``stage_of`` returns the stage of the module that a weight belongs to;
    None for one that every stage may read, such as a constant.

    Raises TraceError if what a stage's weights are used for depends on a later stage, or if a value cannot be handed.
    """
    return _Stager(graph, stage_of, count).split()


class _Stager(Flow):
    def __init__(self, graph: Graph, stage_of: Callable[[str], int | None], count: int):
        super().__init__(graph.module, len(graph.file.states), len(graph.file.inputs))
        self.graph = graph
        self.count = count
        names = [spec.name for spec in graph.file.weights]
        self.given = {
            node: stage for node, name in zip(self.weights, names, strict=True) if (stage := stage_of(name)) is not None
        }
        self.touched = {node: self.states_of([node]) for node in self.nodes}
        self.stage, self.home = self._placed()
        self.own = self._own()

    def _placed(self) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
        """Return the stage of each node and each state."""
        stage = dict.fromkeys(self.nodes, 0)
        home = dict.fromkeys(self.states, 0)
        filled: dict[fx.Node, int] = {}
        """The stage that writes to the memory that a node created, which has everything before its last write."""
        last = {maker: self.order[writers[-1]] for maker, writers in self.writers.items()}
        before = None
        while before != (total := sum(stage.values()) + sum(home.values()) + sum(filled.values())):
            before = total
            for node in self.nodes:
                after = [stage.get(needed, 0) for needed in self.needs[node]]
                after += [self.given.get(value, 0) for value in node.all_input_nodes]
                after += [home[state] for state in self.touched[node]]
                after += [
                    filled.get(maker, 0) for maker in self.memory[node] if self.order[node] <= last.get(maker, -1)
                ]
                stage[node] = here = max([stage[node], *after])
                for state in self.touched[node]:
                    home[state] = max(home[state], here)
                for target in written(node):
                    filled.update((maker, max(filled.get(maker, 0), here)) for maker in self.memory[target])
        return stage, home

    def _bound(self, node: fx.Node) -> bool:
        """Whether a node's stage is given: by a weight, by a state, or because ranks wait for one another in it."""
        weighs = any(value in self.given for value in node.all_input_nodes)
        return weighs or bool(self.touched[node]) or collective(node)

    def _own(self) -> set[fx.Node]:
        """Return the nodes that one stage runs: others depend on inputs only, and run wherever they are needed."""
        own: set[fx.Node] = set()
        filled: set[fx.Node] | None = None
        while filled != (more := {maker for maker, writers in self.writers.items() if not own.isdisjoint(writers)}):
            filled = more  # what one stage writes to is its own, too
            own = self.reached(
                lambda node, filled=filled: self._bound(node) or not filled.isdisjoint(self.memory[node]),
                lambda node: True,
            )
        return own

    def _move_later(self) -> None:
        """Move what only a later stage uses there, if that stage is handed all that it needs anyway: the norm in front
        of a layer is computed from the hidden state, and would be handed beside it."""
        for node in reversed(self.nodes):
            first = min((self.stage[user] for user in node.users if user in self.stage), default=0)
            if first > self.stage[node] and self._movable(node) and self._follows(node, first):
                self.stage[node] = first

    def _movable(self, node: fx.Node) -> bool:
        written_to = any(maker in self.writers for maker in self.memory[node])
        returned = any(user.op == "output" for user in node.users)
        return not (self._bound(node) or written_to or written(node) or returned)

    def _follows(self, node: fx.Node, stage: int) -> bool:
        """Whether ``stage`` can compute a node from what it is handed anyway."""
        for value in node.all_input_nodes:
            known = value not in self.own or any(self.stage.get(user, 0) >= stage for user in value.users)
            if not known and not (self._movable(value) and self._follows(value, stage)):
                return False
        return True

    def split(self) -> StagedGraph:
        self._check_given()
        self._move_later()
        outputs = self.results[: len(self.graph.file.outputs)]
        members, crossing = [], set()
        for stage in range(self.count):
            last = stage == self.count - 1
            seeds = [node for node in self.own if self.stage[node] == stage]
            seeds += [node for node in outputs if last and node not in self.own]
            own = self.closed(seeds, lambda node, stage=stage: node in self.own and self.stage[node] < stage)
            members.append(own)
            crossing |= self._taken(own)
        handed = self.ordered(crossing)
        names = {node: f"{HANDED}{number}" for number, node in enumerate(handed)}
        self._check_final(handed)
        specs = {node: _contiguous(names[node], node.meta["val"]) for node in handed}
        parts = [self._part(stage, members[stage], specs) for stage in range(self.count)]
        return StagedGraph([part for part, _ in parts], [spec for _, spec in parts], list(specs.values()))

    def _taken(self, members: set[fx.Node]) -> set[fx.Node]:
        """Return the values that other stages compute for these nodes."""
        values = {value for node in members for value in node.all_input_nodes}
        return {value for value in values if value.op not in ("placeholder", "get_attr") and value not in members}

    def _check_given(self) -> None:
        """Check that every stage uses the weights of its modules."""
        for node, name in zip(self.weights, (spec.name for spec in self.graph.file.weights), strict=True):
            stage = self.given.get(node)
            used = {self.stage[user] for user in node.users if user in self.stage}
            if stage is None or not used or stage in used:
                continue
            raise TraceError(
                f"the weight {name!r} belongs to pipeline stage {stage} and can be used in stage {min(used)} only"
                f"{self._why_late(node, stage)}: cut the pipeline elsewhere (pipeline_cuts), or let no stage change "
                "what an earlier one reads"
            )

    def _why_late(self, weight: fx.Node, stage: int) -> str:
        """Return why the nodes that use ``weight`` are not in its stage, if that is known."""
        using = [user for user in weight.users if user in self.stage]
        needed = self.closed(using, lambda node: False)
        for state, spec in zip(self.states, self.graph.file.states, strict=True):
            if self.home[state] > stage and any(state in self.touched[node] for node in needed):
                return f", because the state {spec.name!r}, which is read before it, is used there too"
        writers = [w for node in using for maker in self.memory[node] for w in self.writers_of(maker)]
        late = [writer for writer in writers if self.stage[writer] > stage]
        return f", because {late[0].name} ({late[0].target}) changes its result there, in place" if late else ""

    def _check_final(self, handed: list[fx.Node]) -> None:
        """Check that what a later stage reads of a value is what the value is when its stage has run."""
        for node in handed:
            users = [user for user in node.users if self.stage.get(user, 0) > self.stage[node]]
            for writer in (writer for maker in self.memory[node] for writer in self.writers_of(maker)):
                if any(self.order[user] < self.order[writer] for user in users):
                    raise TraceError(
                        f"{node.name} is handed from pipeline stage {self.stage[node]} to a later one, and "
                        f"{writer.name} ({writer.target}) changes it afterwards: make a copy of it first"
                    )

    def _part(self, stage: int, members: set[fx.Node], specs: dict[fx.Node, TensorSpec]) -> tuple[Graph, StageSpec]:
        file = self.graph.file
        takes = self.ordered(self._taken(members))
        states = [node for node in self.states if self.home[node] == stage]
        weights = [node for node in self.weights if any(user in members for user in node.users)]
        new = dict(zip(self.states, self.results[len(file.outputs) :], strict=True))
        names = {spec.name for spec in specs.values()}
        gives: list[tuple[OutputSpec, Any]] = [
            (OutputSpec.model_validate(spec.model_dump()), node)
            for node, spec in specs.items()
            if node in members and self.stage[node] == stage
        ]
        gives += [
            (spec, value)
            for spec, value in zip(file.outputs, self.results, strict=False)
            if self._gives(value) == stage
        ]
        graph, values = self.copied({node: node.name for node in [*states, *self.inputs, *takes, *weights]}, members)
        module = Nodes(self.module, graph)
        own = GraphFile(
            digest="",
            states=[spec for node, spec in zip(self.states, file.states, strict=True) if node in states],
            inputs=[*file.inputs, *(InputSpec.model_validate(specs[node].model_dump()) for node in takes)],
            outputs=[spec for spec, _ in gives],
            weights=[
                spec.model_copy(deep=True)
                for node, spec in zip(self.weights, file.weights, strict=True)
                if node in weights
            ],
        )
        results = [values[value] for _, value in gives]
        graph.output((*results, *(values[new[state]] for state in states)))
        propagate(module, [*own.states, *own.inputs, *own.weights])
        _make_contiguous(module, sum(spec.name in names for spec, _ in gives))
        own.collectives = collective_sequence(module)
        spec = StageSpec(takes=[specs[node].name for node in takes], gives=[spec.name for spec in own.outputs])
        return Graph(module, own, self.graph.constants, self.graph.structure), spec

    def _gives(self, output: Any) -> int:
        """Return the stage that returns an output."""
        return self.stage[output] if output in self.own else self.count - 1


def _contiguous(name: str, value: Any) -> TensorSpec:
    return TensorSpec.of(name, torch.empty(value.shape, dtype=value.dtype, device="meta"))


def _make_contiguous(module: fx.GraphModule, results: int) -> None:
    """Let the first ``results`` results be contiguous, as what is handed on is in shared memory."""
    graph = module.graph
    output = output_of(graph)
    values = list(output.args[0])
    for place, value in enumerate(values[:results]):
        if not value.meta["val"].is_contiguous():
            with graph.inserting_before(output):
                values[place] = call(graph, aten.clone.default, value, memory_format=torch.contiguous_format)
    output.args = (tuple(values),)
