"""``backend="xla"``: graphs are lowered to HLO once for all ranks, and run from it by torch_xla on the CPU.

It is how the way to a Neuron device is run where there is none: all but its compiler. torch_xla is imported where
graphs are lowered, in a process of its own, and where they run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nxd_infer.artifact.manifest import Manifest
from nxd_infer.backends.base import Availability, Executable, Placement, RankGraph, RankRuntime
from nxd_infer.backends.hlo.base import HloBackend, probe_torch_xla
from nxd_infer.errors import TraceConfigError


class XlaBackend(HloBackend):
    name = "xla"

    def probe(self) -> Availability:
        return probe_torch_xla()

    def options(self, given: Mapping[str, Any], quantize: str | None = None) -> dict[str, Any]:
        if given:
            raise TraceConfigError(f"the xla backend takes no compiler_args, got {dict(given)!r}: leave them out")
        return {}

    def compile(self, graph_dir: Path, options: Mapping[str, Any]) -> None:
        from nxd_infer.backends.hlo.lower import lower_directory

        lower_directory(graph_dir)

    def place(self, manifest: Manifest, weight_file: Path, runtime: RankRuntime) -> Placement:
        from nxd_infer.backends.hlo.placement import DevicePlacement

        return DevicePlacement(manifest, weight_file)

    def load(self, ranks: Sequence[RankGraph], runtime: RankRuntime) -> Executable:
        from nxd_infer.backends.xla.replicas import replicas_of

        replicas = replicas_of(len(ranks))  # before anything imports torch_xla
        from nxd_infer.backends.xla.executable import XlaExecutable

        return XlaExecutable(ranks, runtime, replicas)


BACKEND = XlaBackend()
