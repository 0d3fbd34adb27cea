"""What the CPU backends have in common: their facts, their passes, where tensors live, what they ask of a machine.

Torch is imported in the calls that need it: who starts ranks asks for facts and for ``check_target``, and holds none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxd_infer.artifact.manifest import Manifest
from nxd_infer.backends.base import Placement, RankRuntime
from nxd_infer.backends.cpu.target import check_cpu

if TYPE_CHECKING:
    from nxd_infer.graph.canonical import Graph
    from nxd_infer.graph.stored import Lowered


class CpuBackend:
    """The shared half of ``inductor`` and ``eager``."""

    native = True
    one_process = False
    one_program = False
    cross_compiles = False
    neuron_arguments = False
    kept: tuple[str, ...] = ()

    def prepare_trace(self, tp_degree: int, options: Mapping[str, Any]) -> None:
        """Build the native operators before any rank needs them."""
        from nxd_infer.backends.cpu.operators import native_library

        native_library()

    def environment(self, workdir: Path) -> Mapping[str, str]:
        return {}

    def passes(self, graphs: Sequence[Graph], options: Mapping[str, Any]) -> list[Lowered]:
        from nxd_infer.backends.cpu.lower import lower
        from nxd_infer.backends.cpu.operators import native_library

        return lower(graphs, options, native_library())

    def check_target(self, target: Mapping[str, Any], versions: Mapping[str, str]) -> None:
        check_cpu(target)

    def place(self, manifest: Manifest, weight_file: Path, runtime: RankRuntime) -> Placement:
        from nxd_infer.backends.cpu.placement import HostPlacement

        return HostPlacement(manifest, weight_file, runtime)
