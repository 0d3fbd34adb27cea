"""The eager backend: runs the stored graph node by node. No compiler, the reference for the others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nxd_infer.artifact.manifest import GraphSpec
from nxd_infer.backends.base import Availability, Executable, RankRuntime
from nxd_infer.backends.cpu.executable import CpuExecutable, check_spec
from nxd_infer.errors import TraceConfigError
from nxd_infer.graph.ir import Program
from nxd_infer.graph.packing import OPTION, packed_option
from nxd_infer.graph.stored import read_graph, read_ir


class EagerBackend:
    """``backend="eager"``: compiles nothing. Its one option is ``nxd_packed``: False keeps weights plain."""

    name = "eager"
    compiles = False

    def probe(self) -> Availability:
        return Availability(True, versions={"torch": torch.__version__})

    def probe_compiler(self) -> Availability:
        """There is none to look for."""
        return self.probe()

    def has_option(self, name: str) -> bool:
        return name == OPTION

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        if given.keys() - {OPTION}:
            raise TraceConfigError(
                f"the eager backend compiles nothing and takes no compiler_args but {OPTION!r}, got {dict(given)!r}; "
                "leave them out, or trace with backend='inductor'"
            )
        return {OPTION: packed_option(given.get(OPTION, True))}

    def target(self, options: Mapping[str, Any]) -> dict[str, Any]:
        from nxd_infer.backends.cpu.target import describe_target

        return describe_target()

    def check_target(self, target: Mapping[str, Any], versions: Mapping[str, str]) -> None:
        """Nothing beyond what every artifact is checked for."""

    def compile(
        self,
        graph_dir: str | os.PathLike[str],
        options: Mapping[str, Any],
        workdir: str | os.PathLike[str] | None = None,
    ) -> None:
        read_graph(graph_dir)

    def load(
        self,
        graph_dir: str | os.PathLike[str],
        spec: GraphSpec,
        states: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        runtime: RankRuntime,
    ) -> Executable:
        import nxd_infer.comm.ops  # noqa: F401  (torch.ops.nxd.*, for graphs without native collectives)

        graph = read_graph(graph_dir, spec.digest)
        check_spec(graph, spec, runtime)
        program = Program(read_ir(graph_dir))
        return CpuExecutable(graph, states, weights, lambda values: program(*values))


BACKEND = EagerBackend()
