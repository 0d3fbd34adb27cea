"""The plan of a trace: what it will do and need, before anything is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nxd_infer.backends.compile import footprint
from nxd_infer.layout.shard import READ_BYTES
from nxd_infer.util.dtypes import dtype_name
from nxd_infer.util.units import size

SERVE_BYTES = 350 << 20
"""Memory of a rank process besides weights and states."""


@dataclass(frozen=True)
class PlannedBucket:
    """One bucket: its name, and its inputs as text (``tokens int64[1, 128]``)."""

    name: str
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class PlannedStage:
    """One pipeline stage: its first and last module, the bytes of its weights per rank, its share of the work."""

    first: str
    last: str
    weight_bytes: int
    share: float


@dataclass(frozen=True)
class TracePlan:
    """Buckets, bytes, graphs, memory. Sizes are None if they are known only once ``func`` has run in the ranks."""

    tp_degree: int
    backend: str
    buckets: tuple[PlannedBucket, ...]
    graphs: int
    """Distinct graphs to compile, if every rank traces to the same ones; none for a backend without a compiler."""
    weight_bytes: int | None = None
    """Per tensor parallel rank, over all its pipeline stages."""
    state_bytes: int | None = None
    """Likewise."""
    program_bytes: int = 0
    """Memory that this process already holds."""
    tensors: int = 0
    """Number of weights and states per rank."""
    largest_tensor_bytes: int | None = None
    """The largest weight of one rank; one at a time is in memory."""
    builders: int = 0
    """C++ compilers that build the native operators first; none if they are already built."""
    compile_processes: int = 0
    notes: tuple[str, ...] = field(default=())
    pp_degree: int = 1
    stages: tuple[PlannedStage, ...] = ()
    """One per pipeline stage; none without a pipeline."""

    @property
    def phases(self) -> dict[str, int] | None:
        """Estimated memory of each phase of the trace, over all its processes, including what this one holds already.

        This is what the machine must have: private and shared memory, without file pages, which are dropped if memory
        is short. Graphs in the compile cache are counted as if they had to be compiled."""
        if self.weight_bytes is None or self.largest_tensor_bytes is None:
            return None
        exported = self.program_bytes + footprint.exporting(self.tensors, len(self.buckets))
        return {
            "native operators": self.program_bytes + self.builders * footprint.BUILDER,
            # The tensor being written, and a piece of the checkpoint: safetensors copies what it reads, and the C
            # library keeps about as much again until the tensor is complete.
            "export and weights": exported + self.largest_tensor_bytes + 4 * READ_BYTES,
            "compile": exported + self.compile_processes * footprint.compiling(self.tensors),
        }

    @property
    def trace_peak_bytes(self) -> int | None:
        """The maximum of :attr:`phases`."""
        return None if self.phases is None else max(self.phases.values())

    @property
    def serve_bytes(self) -> int | None:
        """Estimated memory of all ranks once loaded."""
        if self.weight_bytes is None:
            return None
        return self.tp_degree * (self.pp_degree * SERVE_BYTES + self.weight_bytes + (self.state_bytes or 0))

    def _per_stage(self, count: int | None) -> str:
        if count is None or self.pp_degree == 1:
            return "" if count is None else size(count)
        return f"{size(count)}, divided over {self.pp_degree} stages"

    def table(self) -> str:
        """Return the plan as text."""
        unknown = "known once func has run in the ranks"
        rows = [
            ("tensor parallel degree", str(self.tp_degree)),
            *([("pipeline parallel degree", str(self.pp_degree))] if self.pp_degree > 1 else []),
            ("backend", self.backend),
            ("graphs to compile", str(self.graphs) if self.compile_processes else "none (run as exported)"),
            ("weights per rank", self._per_stage(self.weight_bytes) or unknown),
            ("states per rank", self._per_stage(self.state_bytes) or unknown),
            ("peak memory, tracing", _about(self.trace_peak_bytes) or unknown),
            ("memory, serving", _about(self.serve_bytes) or unknown),
        ]
        width = max(len(name) for name, _ in rows)
        lines = ["plan", *(f"  {name:<{width}}  {value}" for name, value in rows)]
        if self.stages:
            lines += ["pipeline stages", *(f"  {number}  {_stage(one)}" for number, one in enumerate(self.stages))]
        lines.append("buckets")
        name_width = max((len(bucket.name) for bucket in self.buckets), default=0)
        for bucket in self.buckets:
            first, *others = bucket.inputs if len(bucket.inputs) > 4 else [", ".join(bucket.inputs)]
            shown = f"{first}, and {len(others)} more" if others else first
            lines.append(f"  {bucket.name:<{name_width}}  {shown}")
        return "\n".join([*lines, *self.notes])


def _stage(stage: PlannedStage) -> str:
    modules = stage.first if stage.first == stage.last else f"{stage.first} ... {stage.last}"
    return f"{modules}: {size(stage.weight_bytes)} of weights per rank, {stage.share:.0%} of the work"


def _about(count: int | None) -> str:
    return "" if count is None else f"about {size(count)}"


def planned_inputs(names: Sequence[str], tensors: Sequence) -> tuple[str, ...]:
    """Return inputs as text."""
    return tuple(
        f"{name} {dtype_name(tensor.dtype)}{list(tensor.shape)}" for name, tensor in zip(names, tensors, strict=True)
    )
