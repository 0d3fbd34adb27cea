"""Trace one rank: build its module for each bucket, export, lower, and name what the graphs share.

The buckets of a rank share states (always) and weights (if name and value are equal). A state of one bucket is a
state of every bucket that uses it, even one that only reads it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from nxd_infer.artifact.manifest import BucketSpec, InputSpec, OutputSpec, WeightSpec
from nxd_infer.errors import NxdError, TraceConfigError, TraceError
from nxd_infer.graph.canonical import Graph, configuration, name_lowered, trace_graph
from nxd_infer.graph.export import Step, named_inputs, shared_memory, state_names
from nxd_infer.graph.stored import GraphFile
from nxd_infer.layout.sources import named_tensors
from nxd_infer.trace.ranks.stages import require_one_rounding, split_rank
from nxd_infer.trace.ranks.traced import Built, TracedRank, is_symbolic
from nxd_infer.trace.request import Bucket, BucketModelConfig, TraceRequest, scripted, wants_bucket_rank
from nxd_infer.util.devices import on_host

log = logging.getLogger(__name__)


def build(request: TraceRequest, prepare: Callable[[nn.Module], None] | None = None) -> list[Built]:
    """Call ``func`` for each bucket, but only once for buckets with equal arguments.

    ``prepare(module)`` runs after the names of the states are known, because it may replace parameters.
    """
    built: list[Built] = []
    arguments: list[dict[str, Any]] = []
    for bucket in request.buckets:
        asked = {"bucket_rank": bucket.index} if wants_bucket_rank(request.options.func) else {}
        kwargs = {**asked, **bucket.func_kwargs}
        earlier = (one for one, known in zip(built, arguments, strict=True) if _same(known, kwargs))
        built.append(next(earlier, None) or _call(request, kwargs, prepare))
        arguments.append(kwargs)
    return built


def _same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    try:
        return bool(first == second)
    except Exception:  # treat objects that cannot be compared as different
        return False


def _call(request: TraceRequest, kwargs: dict[str, Any], prepare: Callable[[nn.Module], None] | None) -> Built:
    result = request.options.func(**kwargs)
    module, aliases = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(module, nn.Module):
        raise TraceConfigError(
            f"func must return a torch.nn.Module and a dictionary of input-output aliases, it returned "
            f"{type(result).__name__}{' holding ' + type(module).__name__ if module is not result else ''}"
        )
    if not isinstance(aliases, Mapping):
        raise TraceConfigError(f"the aliases that func returned must be a dictionary, got {type(aliases).__name__}")
    by_output: dict[int, Any] = {}
    for key, index in aliases.items():
        if not isinstance(index, int) or isinstance(index, bool):
            raise TraceConfigError(f"an alias maps a state tensor to the number of an output, got {index!r}")
        if index in by_output:
            raise TraceConfigError(f"output {index} becomes two states; give each state an output of its own")
        by_output[index] = key
    declared = [*getattr(module, "nxd_states", ()), *(request.options.states or ())]
    names = state_names(module, [*by_output.values(), *declared])
    by_output = dict(zip(by_output, names, strict=False))
    module.eval()
    overlaps = shared_memory(module)
    if prepare is not None:
        prepare(module)
    return Built(module, by_output, list(dict.fromkeys(names)), overlaps)


def make_contiguous(module: nn.Module) -> None:
    """Make every parameter and buffer contiguous: files hold nothing else, and a stride is part of a graph."""
    for child in module.modules():
        for table in (child._parameters, child._buffers):
            for tensor in table.values():
                if tensor is not None and not tensor.is_contiguous() and not tensor.is_meta:
                    tensor.data = tensor.data.contiguous()


def require_values(module: nn.Module) -> None:
    """Check that every parameter and buffer is a real CPU tensor. Raises TraceError naming one that is not.

    ``load_state_dict`` on a module built on the meta device reports success but leaves it there, without values.
    """
    for name, tensor in named_tensors(module).items():
        if tensor.is_meta:
            raise TraceError(
                f"{name!r} of {type(module).__name__} is on the meta device and has no values: load_state_dict does "
                "not fill such tensors (unless with assign=True). Build the model on the CPU in func, or give a "
                "checkpoint_loader_callable, which needs no memory for weights while tracing"
            )
        if not on_host(tensor):
            raise TraceError(f"{name!r} of {type(module).__name__} is on {tensor.device}: return the model on the CPU")
    make_contiguous(module)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Keep Python from looking for unreachable objects inside the block, which takes up to a quarter of the time of a
    block that makes many objects and drops few."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_collections()
def trace_buckets(
    request: TraceRequest, built: list[Built], report: Callable[[int], None] | None = None
) -> list[TracedRank]:
    """Export every bucket, and have the backend lower them all. Returns one entry per pipeline stage. Raises TraceError
    naming the bucket."""
    steps = [_step(request, bucket, built) for bucket in request.buckets]
    _order_inputs(steps)
    graphs: dict[int, Graph] = {}
    pending = list(range(len(steps)))
    while pending:
        for index in pending:
            try:
                graphs[index] = trace_graph(steps[index])
            except NxdError as error:
                error.args = (f"bucket {request.buckets[index].name!r}: {error}", *error.args[1:])
                raise
            if report is not None:
                report(index)
        pending = _states_read_elsewhere(steps, list(graphs.values()))
    whole = list(graphs.values())
    traced = TracedRank(built=built, constants=[graph.constants for graph in whole])
    _share(request, traced, whole)
    for bucket, step, graph in zip(request.buckets, steps, whole, strict=True):
        traced.buckets.append(_describe(bucket, step, graph, request.options.batch_dim))
    if request.options.pp_degree == 1:
        return [_lower(request, traced, whole)]
    stages = [_lower(request, *stage) for stage in split_rank(request, traced, whole)]
    require_one_rounding(request, stages)
    return stages


def _lower(request: TraceRequest, traced: TracedRank, graphs: list[Graph]) -> TracedRank:
    traced.lowered = request.backend.passes(graphs, request.backend_options)
    settings = configuration(request.backend.name, request.backend_options)
    traced.graphs = [lowered.graph for lowered in traced.lowered]
    for bucket, graph, lowered in zip(traced.buckets, graphs, traced.lowered, strict=True):
        name_lowered(lowered, graph, settings)
        for spec in lowered.graph.weights:
            traced.weights[spec.name].encoding = spec.encoding
        bucket.graphs = [lowered.digest]
    return traced


def _step(request: TraceRequest, bucket: Bucket, built: list[Built]) -> Step:
    own = built[bucket.index]
    inputs, keyword = named_inputs(own.module, bucket.example, f"example_inputs of bucket {bucket.name!r}")
    step = Step(own.module, inputs, keyword, list(own.states), dict(own.aliases), overlaps=own.overlaps)
    if request.bucket_config is not None and request.bucket_config.shared_state_buffer is not None:
        _share_buffers(request.bucket_config, bucket, built, step)
    return step


def _order_inputs(steps: list[Step]) -> None:
    """Let every bucket take its inputs in the same order, because a call by position must mean the same in all of them.

    Examples by name may have any order: that of a bucket whose example is by position counts, else that of the first.
    """
    order: dict[str, int] = {}
    for step in sorted(steps, key=lambda step: step.keyword):
        for name in step.inputs:
            order.setdefault(name.partition(".")[0], len(order))
    for step in steps:
        if step.keyword:
            step.inputs = dict(sorted(step.inputs.items(), key=lambda item: order[item[0].partition(".")[0]]))


def _share_buffers(config: BucketModelConfig, bucket: Bucket, built: list[Built], step: Step) -> None:
    """Set the step's states of the shared state buffer: the buffer provides the memory, the module sees a view."""
    buffers = config.shared_state_buffer or []
    shared = list(step.aliases.values()) or step.states
    if len(buffers) != len(shared):
        raise TraceConfigError(
            f"shared_state_buffer holds {len(buffers)} tensors, but bucket {bucket.name!r} has {len(shared)} states "
            f"({', '.join(shared)})"
        )
    step.shared = dict(zip(shared, buffers, strict=True))
    own = named_tensors(step.module)
    if config.shared_state_buffer_preprocessor is None:
        for name, buffer in step.shared.items():
            if buffer.shape != own[name].shape or buffer.dtype != own[name].dtype:
                raise TraceConfigError(
                    f"the shared state buffer of {name!r} is {buffer.dtype}{list(buffer.shape)}, the state in bucket "
                    f"{bucket.name!r} is {own[name].dtype}{list(own[name].shape)}: give a "
                    "shared_state_buffer_preprocessor that cuts it"
                )
        return
    shapes = [[list(named_tensors(b.module)[name].shape) for name in shared] for b in built]
    function = scripted(config.shared_state_buffer_preprocessor, "shared_state_buffer_preprocessor")
    places = _views(function, shapes, step.shared, bucket, own)

    def views(states: list[Tensor]) -> list[Tensor]:
        cut = []
        for name, tensor in zip(step.states, states, strict=True):
            for dim, start, length in places.get(name, ()):
                tensor = tensor.narrow(dim, start, length)
            cut.append(tensor)
        return cut

    step.views = views


def _views(
    function: Any, shapes: list[list[list[int]]], shared: dict[str, Tensor], bucket: Bucket, own: dict[str, Tensor]
) -> dict[str, list[tuple[int, int, int]]]:
    """Run the preprocessor once and find which slice of each buffer it returns: ``(dim, start, length)``."""
    bases = [torch.empty(t.shape, dtype=t.dtype) for t in shared.values()]
    views = function(shapes, bases, torch.tensor([bucket.index]))
    if len(views) != len(bases):
        raise TraceConfigError(
            f"shared_state_buffer_preprocessor returned {len(views)} tensors for {len(bases)} states"
        )
    places: dict[str, list[tuple[int, int, int]]] = {}
    for name, base, view in zip(shared, bases, views, strict=True):
        same_memory = view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        if not same_memory or view.dim() != base.dim() or view.stride() != base.stride():
            raise TraceConfigError(
                f"shared_state_buffer_preprocessor must return slices of the shared buffer; for {name!r} in bucket "
                f"{bucket.name!r} it returned {'another tensor' if not same_memory else 'a rearranged view'}"
            )
        if view.shape != own[name].shape:
            raise TraceConfigError(
                f"shared_state_buffer_preprocessor returned shape {list(view.shape)} for {name!r} in bucket "
                f"{bucket.name!r}, where the state has {list(own[name].shape)}"
            )
        offset, places[name] = view.storage_offset(), []
        for dim in sorted(range(base.dim()), key=lambda d: -base.stride(d)):
            start, offset = divmod(offset, base.stride(dim)) if base.stride(dim) else (0, offset)
            places[name].append((dim, start, view.shape[dim]))
    return places


def _states_read_elsewhere(steps: list[Step], traced: list[Graph]) -> list[int]:
    """Declare the states of one bucket in all others that read them; return the buckets to trace again."""
    union = list(dict.fromkeys(name for step in steps for name in step.states))
    again = []
    for index, (step, graph) in enumerate(zip(steps, traced, strict=True)):
        read = {weight.name for weight in graph.file.weights}
        missed = [name for name in union if name not in step.states and name in read]
        if missed:
            step.states += missed
            again.append(index)
    return again


def _share(request: TraceRequest, traced: TracedRank, graphs: list[Graph]) -> None:
    """Fill the tables of states and weights; a weight whose value differs from one of the same name is renamed.

    ``constants`` keep the names that the module uses.
    """
    for bucket, graph in zip(request.buckets, graphs, strict=True):
        for spec in graph.file.states:
            known = traced.states.setdefault(spec.name, spec)
            if (known.dtype, known.shape, known.stride) != (spec.dtype, spec.shape, spec.stride):
                raise TraceConfigError(
                    f"the state {spec.name!r} is {spec.dtype}{spec.shape} in bucket {bucket.name!r} and "
                    f"{known.dtype}{known.shape} in an earlier one; buckets share their states: build it in one "
                    "shape, or give a shared_state_buffer with a preprocessor"
                )
        renamed: dict[str, str] = {}
        for spec in graph.file.weights:
            known_weight = traced.weights.get(spec.name)
            if known_weight is None or not _equal(traced, bucket.index, spec, known_weight):
                name = spec.name if known_weight is None else f"{spec.name}@{bucket.name}"
                renamed[spec.name] = name
                traced.origin[name] = (bucket.index, spec.name)
                traced.weights[name] = spec.model_copy(update={"name": name})
        different = [name for name, new in renamed.items() if name != new and not name.startswith("constant:")]
        if different:
            log.warning(
                "bucket %s holds other values than an earlier one for %d weights (%s): each gets a copy of its own. "
                "If that is not meant, seed the initialisation or load the weights in func",
                bucket.name,
                len(different),
                ", ".join(different[:4]),
            )
        for spec in graph.file.weights:
            spec.name = renamed.get(spec.name, spec.name)


def _equal(traced: TracedRank, index: int, spec: WeightSpec, known: WeightSpec) -> bool:
    if (spec.dtype, spec.shape, spec.stride) != (known.dtype, known.shape, known.stride):
        return False
    at, name = traced.origin[known.name]
    if name == spec.name and name not in traced.constants[index] and traced.built[at] is traced.built[index]:
        return True  # one tensor of one module, whatever its values are: NaN is not equal to itself
    first, second = traced.value(at, name), traced.value(index, spec.name)
    if first is second:
        return True
    if is_symbolic(first) or is_symbolic(second):
        return True  # no values yet: both will be read from the checkpoint under this name
    return torch.equal(first, second)


def _rows_of(dim: int, bucket: Bucket, module: nn.Module, file: GraphFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a module would declare whose rows along ``dim`` are independent. Raises TraceConfigError."""
    where, kind = f"batch_dim={dim}: bucket {bucket.name!r}", type(module).__name__
    if getattr(module, "nxd_inputs", None) or getattr(module, "nxd_outputs", None):
        raise TraceConfigError(f"batch_dim={dim}: {kind} declares nxd_inputs or nxd_outputs: leave one of the two out")
    if file.states:
        raise TraceConfigError(
            f"{where} changes the state {file.states[0].name!r}, which rows of padding would change too: leave "
            f"batch_dim out, or declare nxd_inputs in {kind}"
        )
    rows = next((spec.shape[dim] for spec in file.inputs if len(spec.shape) > dim), None)
    for what, specs in (("input", file.inputs), ("output", file.outputs)):
        for spec in specs:
            if spec.shape[dim : dim + 1] != [rows]:
                raise TraceConfigError(
                    f"{where}: its {what} {spec.name!r} of shape {spec.shape} does not have the {rows} rows of the "
                    f"first input in dimension {dim}: leave batch_dim out, or declare nxd_inputs and nxd_outputs in "
                    f"{kind}"
                )
    cut = {"cut": {dim: (file.inputs[0].name, dim)}} if file.inputs else {}
    return {spec.name: {"pad": {dim: 0}} for spec in file.inputs}, {spec.name: cut for spec in file.outputs}


def _describe(bucket: Bucket, step: Step, graph: Graph, batch_dim: int | None) -> BucketSpec:
    """Describe the bucket's inputs and outputs, with the module's declarations about them."""
    module, file = step.module, graph.file
    declared_inputs = dict(getattr(module, "nxd_inputs", {}) or {})
    declared_outputs = dict(getattr(module, "nxd_outputs", {}) or {})
    if batch_dim is not None:
        declared_inputs, declared_outputs = _rows_of(batch_dim, bucket, module, file)
    names = [spec.name for spec in file.inputs]
    for what, declared, known, keys in (
        ("nxd_inputs", declared_inputs, names, ("role", "default", "pad", "minimum", "maximum")),
        ("nxd_outputs", declared_outputs, [spec.name for spec in file.outputs], ("role", "cut")),
    ):
        unknown = [name for name in declared if name not in known]
        # A bucket with inputs by name may omit some that another one has.
        if unknown and not (step.keyword and what == "nxd_inputs"):
            raise TraceConfigError(
                f"{what} of {type(module).__name__} names {unknown[0]!r}, but bucket {bucket.name!r} has {known}"
            )
        odd = [f"{name!r}: {key!r}" for name, entry in declared.items() for key in entry if key not in keys]
        if odd:
            raise TraceConfigError(
                f"{what} of {type(module).__name__} says {odd[0]}, which means nothing; it may say {', '.join(keys)}"
            )
    try:
        described = BucketSpec(
            name=bucket.name,
            inputs=[
                InputSpec.model_validate({**spec.model_dump(), **declared_inputs.get(spec.name, {})})
                for spec in file.inputs
            ],
            outputs=[
                OutputSpec.model_validate({**spec.model_dump(), **declared_outputs.get(spec.name, {})})
                for spec in file.outputs
            ],
            graphs=[],
            structure=graph.structure,
            metadata=bucket.metadata,
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise TraceConfigError(
            f"nxd_inputs or nxd_outputs of {type(module).__name__}: {where + ': ' if where else ''}{first['msg']}"
        ) from error
    for spec in described.inputs:  # padding and defaults reach the graph, too
        for value in [*spec.pad.values(), *([] if spec.default is None else [spec.default])]:
            if not spec.allows(value):
                raise TraceConfigError(
                    f"nxd_inputs fills {spec.name!r} with {value:g}, which is outside its own range of "
                    f"{spec.minimum} to {spec.maximum}"
                )
    return described
