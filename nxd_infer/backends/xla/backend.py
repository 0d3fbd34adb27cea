"""``backend="xla"``: graphs are lowered to HLO once for all ranks, and run from it by torch_xla on the CPU.

It is how the way to a Neuron device is run where there is none: all but its compiler. torch_xla is imported where
graphs are lowered, in a process of its own, and where they run.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxd_infer.artifact.manifest import Manifest
from nxd_infer.backends import hlo, xla
from nxd_infer.backends.base import Availability, Executable, Placement, Quantization, RankGraph, RankRuntime
from nxd_infer.errors import ArtifactVersionError, TraceConfigError
from nxd_infer.util.machine import architecture, torch_minor, torch_version
from nxd_infer.util.processors import available_cores

if TYPE_CHECKING:
    from nxd_infer.graph.canonical import Graph
    from nxd_infer.graph.stored import Lowered

REVISION = 1
"""Of what a graph's directory holds; counts up when an earlier one cannot be read any more."""


class XlaBackend:
    name = "xla"
    native = False
    one_process = True
    one_program = True
    compiles = True
    cross_compiles = False
    neuron_arguments = False
    target_option = ""
    targets: tuple[str, ...] = ()
    encodings: frozenset[str] = frozenset()
    quantizations: Mapping[str, Quantization] = {}
    unpacked: Mapping[str, Any] = {}
    same_rounding: Mapping[str, Any] = {}
    kept: tuple[str, ...] = ()

    def probe(self) -> Availability:
        """By the packages' versions: an import takes seconds, and starts the device's runtime."""
        found = {"torch": torch_version()}
        try:
            found["torch_xla"] = importlib.metadata.version("torch_xla")
        except importlib.metadata.PackageNotFoundError:
            return Availability(False, "torch_xla is not installed: pip install 'nxd-infer[xla]'", found)
        ours, needed = torch_minor(found["torch"]), torch_minor(found["torch_xla"])
        if ours != needed:
            reason = f"torch_xla {found['torch_xla']} needs torch {needed}, and this is torch {found['torch']}"
            return Availability(False, f"{reason}: pip install 'nxd-infer[xla]' in an environment of its own", found)
        return Availability(True, "", found, {f"{architecture()} processor": len(available_cores())})

    def probe_compiler(self) -> Availability:
        return self.probe()

    def has_option(self, name: str) -> bool:
        return False

    def options(self, given: Mapping[str, Any], quantize: str | None = None) -> dict[str, Any]:
        if given:
            raise TraceConfigError(f"the xla backend takes no compiler_args, got {dict(given)!r}: leave them out")
        return {}

    def prepare_trace(self, tp_degree: int, options: Mapping[str, Any]) -> None:
        """There is nothing to build."""

    def passes(self, graphs: Sequence[Graph], options: Mapping[str, Any]) -> list[Lowered]:
        return hlo.parts.lower_graphs(graphs)

    def environment(self, workdir: Path) -> Mapping[str, str]:
        return xla.replicas.environment(1)

    def compiler(self) -> str:
        return f"torch_xla {self.probe().versions.get('torch_xla', '')}"

    def compile(self, graph_dir: Path, options: Mapping[str, Any]) -> None:
        hlo.lower.lower_directory(graph_dir)

    def target(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"revision": REVISION}

    def check_target(self, target: Mapping[str, Any], versions: Mapping[str, str]) -> None:
        if target.get("revision") != REVISION:
            raise ArtifactVersionError(
                f"holds HLO of another revision than {REVISION}, which this version reads: "
                f"{target.get('revision')!r}; trace it again"
            )

    def place(self, manifest: Manifest, weight_file: Path, runtime: RankRuntime) -> Placement:
        return hlo.placement.DevicePlacement(manifest, weight_file)

    def load(self, ranks: Sequence[RankGraph], runtime: RankRuntime) -> Executable:
        replicas = xla.replicas.replicas_of(len(ranks))  # before anything imports torch_xla
        return xla.executable.XlaExecutable(ranks, runtime, replicas)


BACKEND = XlaBackend()
