"""The CPU's backend: a prebuilt loop runs the stored graph, and nothing is compiled for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxd_infer.artifact.manifest import Manifest, TensorSpec, WeightSpec
from nxd_infer.backends.base import Availability, Backend, Executable, Placement, Quantization, RankGraph, RankRuntime
from nxd_infer.backends.cpu.encodings import ENCODINGS, MINIMUM_BYTES, PACKED_OPTION, QUANTIZATIONS, QUANTIZE
from nxd_infer.errors import ArtifactVersionError, TraceConfigError
from nxd_infer.util.machine import architecture, available_cores, torch_version

if TYPE_CHECKING:
    from torch import Tensor

    from nxd_infer.graph.canonical import Graph
    from nxd_infer.graph.stored import Lowered


class CpuBackend(Backend):
    """``backend="cpu"``: compiles nothing. Its only option is ``nxd_packed``: False keeps weights plain.

    Its imports in functions are of what needs torch.
    """

    name = "cpu"
    native = True
    lazy_states = True
    compiles = False
    encodings = ENCODINGS
    quantizations: Mapping[str, Quantization] = QUANTIZATIONS
    unpacked: Mapping[str, Any] = {PACKED_OPTION: False}

    def probe(self) -> Availability:
        why = "" if _native().has_stable_abi() else _native().availability().reason
        return Availability(
            True,
            versions={"torch": torch_version()},
            devices={f"{architecture()} processor": len(available_cores())},
            limits=f"operators and collectives are PyTorch's own, which is slower: {why}" if why else "",
        )

    def has_option(self, name: str) -> bool:
        return name == PACKED_OPTION

    def prepare_trace(self, tp_degree: int, options: Mapping[str, Any]) -> None:
        """Build the native operators and the loop before any rank needs them."""
        from nxd_infer.backends.cpu import program

        _native().load_if_possible()
        program.prepare()

    def options(self, given: Mapping[str, Any], quantize: str | None = None) -> dict[str, Any]:
        if given.keys() - {PACKED_OPTION}:
            raise TraceConfigError(
                f"the cpu backend compiles nothing and takes no compiler_args but {PACKED_OPTION!r}, got "
                f"{dict(given)!r}; leave them out"
            )
        options: dict[str, Any] = {PACKED_OPTION: packed_option(given.get(PACKED_OPTION, True))}
        return {**options, **quantize_option(quantize, options)}

    def passes(self, graphs: Sequence[Graph], options: Mapping[str, Any]) -> list[Lowered]:
        from nxd_infer.backends.cpu import lower

        return lower.lower(graphs, options, _native().load_if_possible())

    def target(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"arch": architecture()}  # operators pick their instructions where they run

    def check_target(self, target: Mapping[str, Any], versions: Mapping[str, str]) -> None:
        arch = target.get("arch")
        if arch and arch != architecture():
            raise ArtifactVersionError(
                f"was compiled for {arch} and this machine is {architecture()}: use `nxd-infer recompile` "
                "here, or trace it again"
            )

    def encoded(self, spec: WeightSpec) -> TensorSpec:
        from nxd_infer.backends.cpu.packing import encoded_spec

        held = encoded_spec(spec, spec.encoding)
        return TensorSpec(name=held.name, dtype=held.dtype, shape=held.shape, stride=held.stride)

    def encode(self, spec: WeightSpec, plain: Tensor) -> Tensor:
        from nxd_infer.backends.cpu.placement import pack

        held = self.encoded(spec)
        out = plain.new_empty(held.shape, dtype=held.torch_dtype)
        pack(spec, plain, out, _native().load_if_possible())
        return out

    def place(self, manifest: Manifest, weight_file: Path, runtime: RankRuntime) -> Placement:
        from nxd_infer.backends.cpu.placement import HostPlacement

        return HostPlacement(manifest, weight_file, runtime)

    def load(self, ranks: Sequence[RankGraph], runtime: RankRuntime) -> Executable:
        from nxd_infer.backends.checks import checked_graph
        from nxd_infer.backends.cpu import lower, program

        (rank,) = ranks
        graph = checked_graph(rank, runtime)
        ready = program.load(lower.read_program(rank.directory))
        return program.CpuExecutable(graph, rank.states, rank.weights, ready)


def packed_option(value: Any) -> int:
    """Return the least size in bytes of a packed weight; 0 for none. Raises TraceConfigError for another value."""
    if isinstance(value, bool):
        return MINIMUM_BYTES if value else 0
    if isinstance(value, int) and value > 0:
        return value
    raise TraceConfigError(
        f"compiler_args: {PACKED_OPTION}={value!r} must be True, False, or the number of bytes from which on a weight "
        f"is packed (True means {MINIMUM_BYTES})"
    )


def quantize_option(value: str | None, options: Mapping[str, Any]) -> dict[str, str]:
    """Return what ``quantize=value`` adds to a trace's configuration. Raises TraceConfigError if weights are not to be
    packed."""
    if value is None:
        return {}
    if not options.get(PACKED_OPTION):
        raise TraceConfigError(
            f"quantize={value!r} is a form of packed weights and compiler_args turn those off ({PACKED_OPTION}=False): "
            "leave one of the two out"
        )
    return {QUANTIZE: value}


def _native() -> Any:
    from nxd_infer import native  # slow: torch

    return native


BACKEND = CpuBackend()
