"""The host's part of a step: the head before the body, the tail after it, and the states that both keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from nxd_infer.backends.hlo.files import HEAD_FILE, TAIL_FILE, PartsFile
from nxd_infer.graph.ir import Program
from nxd_infer.graph.stored import GraphFile, read_ir

Body = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Runs the device's part: from inputs and what the head made to what the host fetches, by name."""


class Held(Protocol):
    """A state of the host's."""

    value: Tensor


class HostParts:
    """Head and tail of one graph. Raises ArtifactCorruptError when a file is not there or not one."""

    def __init__(self, directory: Path, graph: GraphFile, parts: PartsFile):
        self._parts = parts
        self._head = Program(read_ir(directory, HEAD_FILE))
        self._tail = Program(read_ir(directory, TAIL_FILE))
        count = len(graph.states)
        self._inputs = parts.given[count : count + len(graph.inputs)]
        own = [place for place in range(count) if parts.given[place] not in parts.body.takes]
        self._states = [(graph.states[place].name, parts.given[place], parts.new_states[place]) for place in own]

    def run(self, states: Mapping[str, Held], inputs: Sequence[Tensor], body: Body) -> list[Tensor]:
        """The graph's outputs. ``states`` holds those of the host by name, which take their new values."""
        known = dict(zip(self._inputs, inputs, strict=True))
        known.update((given, states[name].value) for name, given, _ in self._states)
        with torch.no_grad():
            known.update(_run(self._head, self._parts.head.takes, self._parts.head.gives, known))
            known.update(body(known))
            known.update(_run(self._tail, self._parts.tail.takes, self._parts.tail.gives, known))
        for name, _, new in self._states:
            states[name].value = known[new]
        return [known[name] for name in self._parts.outputs]


def _run(
    program: Program, takes: Sequence[str], gives: Sequence[str], known: Mapping[str, Tensor]
) -> Iterable[tuple[str, Tensor]]:
    return zip(gives, program(*[known[name] for name in takes]), strict=True)
