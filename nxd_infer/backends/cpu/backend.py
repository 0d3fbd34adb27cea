"""The CPU's own backend: a prebuilt loop runs the stored graph, and nothing is compiled for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nxd_infer import backends
from nxd_infer.backends import cpu
from nxd_infer.backends.base import Availability, Executable, RankGraph, RankRuntime
from nxd_infer.backends.cpu.base import CpuBackend
from nxd_infer.backends.cpu.options import PACKED_OPTION, packed_option, quantize_option
from nxd_infer.backends.cpu.target import describe_target
from nxd_infer.errors import TraceConfigError


class NativeBackend(CpuBackend):
    """``backend="cpu"``, also known as ``"eager"``: compiles nothing. Its only option is ``nxd_packed``: False keeps
    weights plain."""

    name = "cpu"
    compiles = False

    def probe(self) -> Availability:
        why = cpu.operators.why_unsupported()
        return self.available(f"operators and collectives are PyTorch's own, which is slower: {why}" if why else "")

    def probe_compiler(self) -> Availability:
        """There is none to look for."""
        return self.probe()

    def has_option(self, name: str) -> bool:
        return name == PACKED_OPTION

    def prepare_trace(self, tp_degree: int, options: Mapping[str, Any]) -> None:
        super().prepare_trace(tp_degree, options)
        cpu.program.prepare()

    def options(self, given: Mapping[str, Any], quantize: str | None = None) -> dict[str, Any]:
        if given.keys() - {PACKED_OPTION}:
            raise TraceConfigError(
                f"the cpu backend compiles nothing and takes no compiler_args but {PACKED_OPTION!r}, got "
                f"{dict(given)!r}; leave them out, or trace with backend='inductor'"
            )
        options: dict[str, Any] = {PACKED_OPTION: packed_option(given.get(PACKED_OPTION, True))}
        return {**options, **quantize_option(quantize, options)}

    def compile(self, graph_dir: Path, options: Mapping[str, Any]) -> None:
        """Do nothing: the lowered graph is what runs."""

    def target(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return describe_target()

    def load(self, ranks: Sequence[RankGraph], runtime: RankRuntime) -> Executable:
        (rank,) = ranks
        graph = backends.checks.checked_graph(rank, runtime)
        program = cpu.program.load(cpu.lower.read_program(rank.directory))
        return cpu.executable.CpuExecutable(graph, rank.states, rank.weights, program)


BACKEND = NativeBackend()
