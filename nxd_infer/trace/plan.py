"""The plan of a trace: what it will do and need, before anything is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from nxd_infer import native
from nxd_infer.graph.export import named_inputs
from nxd_infer.graph.returned import key_text
from nxd_infer.layout.shard import READ_BYTES
from nxd_infer.pipeline.partition import describe_partition
from nxd_infer.runtime.memory_plan import activation_bytes, process_bytes, rows_of
from nxd_infer.trace.ranks.from_checkpoint import build_without_weights
from nxd_infer.trace.ranks.stages import stage_cuts
from nxd_infer.trace.ranks.traced import Built
from nxd_infer.trace.request import TraceRequest
from nxd_infer.util.dtypes import dtype_name
from nxd_infer.util.memory import held_memory
from nxd_infer.util.units import size

# Memory, measured on Linux (torch 2.13, g++ 12) as private and shared memory without file pages, with Llamas of
# 2, 16 and 28 layers; ``python -m bench trace`` measures again, and fails if a plan is off by more than 10 %.
PROGRAM_BYTES = 230 << 20
"""A process that has imported what a trace needs, if the system does not report the size of this one."""
EXPORTER_BYTES = 31 << 20
"""Additional imports of the first export."""
EXPORTED_TENSOR_BYTES = 59 << 10
"""What an exported graph leaves behind per weight and state: its operators grow with their number."""
BUILDER_BYTES = 305 << 20
"""A C++ compiler of the native operators; as many run as there are processors."""


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
    held_bytes: int | None = None
    """Of the weights once they are loaded, likewise: fewer than ``weight_bytes`` if they are quantized."""
    working_bytes: int = 0
    """Activations of the largest bucket, likewise."""
    program_bytes: int = 0
    """Memory that this process already holds."""
    tensors: int = 0
    """Number of weights and states per rank."""
    largest_tensor_bytes: int | None = None
    """The largest weight of one rank; one at a time is in memory."""
    builders: int = 0
    """C++ compilers that build the native operators first; none if they are already built."""
    notes: tuple[str, ...] = field(default=())
    pp_degree: int = 1
    stages: tuple[PlannedStage, ...] = ()
    """One per pipeline stage; none without a pipeline."""

    @property
    def phases(self) -> dict[str, int] | None:
        """Estimated memory of each phase of the trace, over all its processes, including what this one holds already.

        This is what the machine must have: private and shared memory, without file pages, which are dropped if memory
        is short. It does not include a backend's compiler."""
        if self.weight_bytes is None or self.largest_tensor_bytes is None:
            return None
        exported = EXPORTER_BYTES + EXPORTED_TENSOR_BYTES * self.tensors * len(self.buckets)
        return {
            "native operators": self.program_bytes + self.builders * BUILDER_BYTES,
            # The tensor being written, and a piece of the checkpoint: safetensors copies what it reads, and the C
            # library keeps about as much again until the tensor is complete.
            "export and weights": self.program_bytes + exported + self.largest_tensor_bytes + 4 * READ_BYTES,
        }

    @property
    def trace_peak_bytes(self) -> int | None:
        """The maximum of :attr:`phases`."""
        return None if self.phases is None else max(self.phases.values())

    @property
    def serve_bytes(self) -> int | None:
        """Estimated memory of all ranks once loaded."""
        if self.held_bytes is None:
            return None
        tensors = self.held_bytes + (self.state_bytes or 0) + self.working_bytes
        return process_bytes(self.tp_degree * self.pp_degree) + self.tp_degree * tensors

    def _parts(self) -> list[tuple[str, str]]:
        """What the memory of serving consists of, over all ranks."""
        if self.held_bytes is None:
            return []
        of_ranks = {"weights": self.held_bytes, "states": self.state_bytes or 0, "activations": self.working_bytes}
        parts = {name: self.tp_degree * count for name, count in of_ranks.items()}
        parts["processes"] = process_bytes(self.tp_degree * self.pp_degree)
        return [(f"  {name}", size(count)) for name, count in parts.items()]

    def table(self) -> str:
        """Return the plan as text."""

        def told(count: int | None, text: str = "{}") -> str:
            return "known once func has run in the ranks" if count is None else text.format(size(count))

        divided = "{}" if self.pp_degree == 1 else f"{{}}, divided over {self.pp_degree} stages"
        rows = [
            ("tensor parallel degree", str(self.tp_degree)),
            *([("pipeline parallel degree", str(self.pp_degree))] if self.pp_degree > 1 else []),
            ("backend", self.backend),
            ("graphs to compile", str(self.graphs) if self.graphs else "none (run as exported)"),
            ("weights per rank", told(self.weight_bytes, divided)),
            ("states per rank", told(self.state_bytes, divided)),
            ("peak memory, tracing", told(self.trace_peak_bytes, "about {}")),
            ("memory, serving", told(self.serve_bytes, "about {}")),
            *self._parts(),
        ]
        width = max(len(name) for name, _ in rows)
        lines = ["plan", *(f"  {name:<{width}}  {value}" for name, value in rows)]
        lines += ["pipeline stages"] if self.stages else []
        for number, stage in enumerate(self.stages):
            modules = stage.first if stage.first == stage.last else f"{stage.first} ... {stage.last}"
            weights = f"{size(stage.weight_bytes)} of weights per rank"
            lines.append(f"  {number}  {modules}: {weights}, {stage.share:.0%} of the work")
        lines.append("buckets")
        name_width = max((len(bucket.name) for bucket in self.buckets), default=0)
        for bucket in self.buckets:
            first, *others = bucket.inputs if len(bucket.inputs) > 4 else [", ".join(bucket.inputs)]
            shown = f"{first}, and {len(others)} more" if others else first
            lines.append(f"  {bucket.name:<{name_width}}  {shown}")
        return "\n".join([*lines, *self.notes])


def make_plan(request: TraceRequest) -> TracePlan:
    """See ``trace_plan``."""
    options, backend = request.options, request.backend
    built = None if request.loader is None else build_without_weights(request)
    buckets = []
    tokens = 0
    for bucket in request.buckets:
        if built is None:
            leaves = pytree.tree_flatten_with_path(bucket.example)[0]
            inputs = {".".join(map(key_text, path)): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
        else:
            where = f"example_inputs of bucket {bucket.name!r}"
            inputs, _ = named_inputs(built[bucket.index].module, bucket.example, where)
            roles = getattr(built[bucket.index].module, "nxd_inputs", {})
            told = [(tensor.shape, roles.get(name, {}).get("role")) for name, tensor in inputs.items()]
            tokens = max(tokens, rows_of(told))
        shown = (f"{name} {dtype_name(tensor.dtype)}{list(tensor.shape)}" for name, tensor in inputs.items())
        buckets.append(PlannedBucket(bucket.name, tuple(shown)))
    notes = []
    if options.quantize is not None:
        form = backend.quantizations[options.quantize]
        notes.append(f"note: linear layers keep their weights in {form.name} in memory, not in the artifact{form.note}")
    if ignored := " ".join(request.ignored_arguments):
        notes.append(f"note: the {backend.name} backend ignores what is for the Neuron compiler: {ignored}")
    return TracePlan(
        tp_degree=options.tp_degree,
        pp_degree=options.pp_degree,
        backend=backend.name,
        buckets=tuple(buckets),
        graphs=options.pp_degree * len(buckets) if backend.compiles else 0,
        program_bytes=held_memory() or PROGRAM_BYTES,
        builders=native.builders() if backend.native else 0,
        notes=tuple(notes),
        **({} if built is None else _sizes(request, built, tokens)),
    )


def _sizes(request: TraceRequest, built: list[Built], tokens: int) -> dict[str, Any]:
    options = request.options
    forms = request.backend.quantizations
    form = forms[options.quantize] if options.quantize else None
    vocabulary = (options.metadata or {}).get("vocab_size")
    heads = () if vocabulary is None else (vocabulary, -(-vocabulary // options.tp_degree))
    states: dict[str, int] = {}
    weights: dict[str, int] = {}
    shapes: dict[str, Sequence[int]] = {}
    held: dict[str, int] = {}
    for one in {id(one): one for one in built}.values():
        for name, tensor in (*one.module.named_parameters(), *one.module.named_buffers()):
            (states if name in one.states else weights)[name] = tensor.numel() * tensor.element_size()
            if name in weights:
                shapes[name] = tensor.shape
                owner = one.module.get_submodule(name.rpartition(".")[0])
                linear = tensor.dim() > 1 and tensor.is_floating_point() and not hasattr(owner, "num_embeddings")
                held[name] = weights[name]
                if form is not None and linear:
                    own = forms.get("int8", form) if tensor.dim() == 3 or tensor.shape[0] in heads else form
                    held[name] = own.nbytes(tensor.shape)
    module = built[0].module
    costs = describe_partition(module, stage_cuts(options, module)) if options.pp_degree > 1 else []
    whole = sum(stage.cost for stage in costs) or 1.0
    return {
        "weight_bytes": sum(weights.values()),
        "state_bytes": sum(states.values()),
        "held_bytes": sum(held.values()),
        "working_bytes": activation_bytes(
            tokens,
            [(shape, weights[name]) for name, shape in shapes.items()],
            vocabulary,
            options.tp_degree,
        ),
        "largest_tensor_bytes": max([*weights.values(), 0]),
        "tensors": len(weights) + len(states),
        "stages": tuple(PlannedStage(one.first, one.last, one.bytes, one.cost / whole) for one in costs),
    }
