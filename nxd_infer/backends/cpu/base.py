"""What the CPU backends have in common: facts, passes, where tensors are placed, what they need of a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxd_infer.artifact.manifest import Manifest
from nxd_infer.backends import cpu
from nxd_infer.backends.base import Availability, Placement, Quantization, RankRuntime
from nxd_infer.backends.cpu.encodings import ENCODINGS, QUANTIZATIONS
from nxd_infer.backends.cpu.options import PACKED_OPTION
from nxd_infer.backends.cpu.target import check_cpu
from nxd_infer.util.machine import architecture, torch_version
from nxd_infer.util.processors import available_cores

if TYPE_CHECKING:
    from nxd_infer.graph.canonical import Graph
    from nxd_infer.graph.stored import Lowered


class CpuBackend:
    """Base class of ``inductor`` and ``eager``."""

    native = True
    compiles: bool
    one_process = False
    one_program = False
    compile_imports = ""
    cross_compiles = False
    neuron_arguments = False
    target_option = ""
    targets: tuple[str, ...] = ()
    encodings = ENCODINGS
    quantizations: Mapping[str, Quantization] = QUANTIZATIONS
    unpacked: Mapping[str, Any] = {PACKED_OPTION: False}
    same_rounding: Mapping[str, Any] = {}
    kept: tuple[str, ...] = ()

    def available(self, limits: str = "") -> Availability:
        """Return the result of a probe that succeeded."""
        return Availability(
            True,
            versions={"torch": torch_version()},
            devices={f"{architecture()} processor": len(available_cores())},
            limits=limits,
        )

    def prepare_trace(self, tp_degree: int, options: Mapping[str, Any]) -> None:
        """Build the native operators before any rank needs them."""
        cpu.operators.native_library()

    def compiler(self) -> str:
        return ""

    def environment(self, workdir: Path) -> Mapping[str, str]:
        return {}

    def passes(self, graphs: Sequence[Graph], options: Mapping[str, Any]) -> list[Lowered]:
        return cpu.lower.lower(graphs, options, cpu.operators.native_library(), fused=not self.compiles)

    def check_target(self, target: Mapping[str, Any], versions: Mapping[str, str]) -> None:
        check_cpu(target)

    def place(self, manifest: Manifest, weight_file: Path, runtime: RankRuntime) -> Placement:
        return cpu.placement.HostPlacement(manifest, weight_file, runtime)
