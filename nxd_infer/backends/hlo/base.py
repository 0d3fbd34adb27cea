"""What backends of XLA devices have in common: facts, passes, and the environment of what lowers graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxd_infer.backends import hlo
from nxd_infer.backends.base import Quantization
from nxd_infer.backends.hlo import installed

if TYPE_CHECKING:
    from nxd_infer.graph.canonical import Graph
    from nxd_infer.graph.stored import Lowered


class HloBackend:
    """Base class of ``xla`` and ``neuron``."""

    native = False
    one_process = True
    one_program = True
    compiles = True
    encodings: frozenset[str] = frozenset()
    quantizations: Mapping[str, Quantization] = {}
    unpacked: Mapping[str, Any] = {}

    def passes(self, graphs: Sequence[Graph], options: Mapping[str, Any]) -> list[Lowered]:
        return hlo.parts.lower_graphs(graphs)

    def environment(self, workdir: Path) -> Mapping[str, str]:
        return installed.environment(1)
