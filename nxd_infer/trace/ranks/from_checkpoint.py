"""Loader mode: all ranks are traced in this process on parameters without memory, weights come from a checkpoint.

``func`` builds the module of each rank in turn; ranks that cannot be told apart are exported once. A parameter loses
its memory as soon as the module registers it; buffers, which hold computed values (rotary frequencies, masks, rank
offsets), stay real. For export the parameters become fake CPU tensors. Each rank's weights are then read from the
checkpoint slice by slice and written.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.artifact.manifest import WeightSpec
from nxd_infer.checkpoint.source import weight_source
from nxd_infer.comm import register_collectives, unregister_collectives
from nxd_infer.context import use_context
from nxd_infer.errors import CollectiveError, NxdError, TraceError, WeightMismatchError
from nxd_infer.layout import ParamLayout, check_weights, shard_tensor
from nxd_infer.layout.shard import stored_layout
from nxd_infer.trace.ranks import files as rank_files
from nxd_infer.trace.ranks import one_rank
from nxd_infer.trace.ranks.equal_ranks import EqualRanks, Watch, WatchedContext
from nxd_infer.trace.ranks.rank_graphs import Built, RankGraphs, value_of
from nxd_infer.trace.request import TracedRank, TraceRequest, tracing_context
from nxd_infer.util.devices import HOST
from nxd_infer.util.mapped_memory import UntouchedZeros
from nxd_infer.util.memory import give_back

log = logging.getLogger(__name__)

_construction = threading.Lock()


def trace_ranks_here(
    request: TraceRequest, build: Path, loader: Callable[[], Any], progress: Callable[[str, int, int, str], None]
) -> list[TracedRank]:
    """Trace every rank in this process. Raises TraceError with the rank, WeightMismatchError for the checkpoint."""
    try:
        source = weight_source(loader())
    except NxdError:
        raise
    except Exception as error:
        raise TraceError(f"checkpoint_loader_callable raised {type(error).__name__}: {error}") from error
    total = request.tp_degree * len(request.buckets)
    results = []
    equal = EqualRanks()
    progress("trace ranks", 0, total, "")
    for rank in range(request.tp_degree):
        done = rank * len(request.buckets)

        def report(index: int, rank: int = rank, done: int = done) -> None:
            progress("trace ranks", done + index + 1, total, f"rank {rank}: {request.buckets[index].name}")

        with _as_rank(request, rank) as watch:
            results += _trace(request, rank, build, source, report, equal, watch)
        if not equal.kept:
            gc.collect()  # graphs are cycles; free them before the next rank or the compilers
        give_back()
    if equal.kept:
        del equal
        gc.collect()
    progress("trace ranks", total, total, "")
    return sorted(results, key=lambda result: result.rank)


@contextlib.contextmanager
def _as_rank(request: TraceRequest, rank: int) -> Iterator[Watch]:
    """Make this thread ``rank`` inside the block; a collective that is not being exported is an error.

    Yields what notes whether the rank is read.
    """
    key = f"loader-{id(request)}-{rank}"
    register_collectives(key, _NoCollectives())
    watch = Watch()
    context = tracing_context(request.tp_degree, request.pp_degree, rank, key)
    try:
        with use_context(WatchedContext.of(context, watch)):
            yield watch
    except NxdError as error:
        if isinstance(error, TraceError) and error.rank is None and request.tp_degree > 1:
            error.rank = rank
        raise
    finally:
        unregister_collectives(key)


def _trace(
    request: TraceRequest,
    rank: int,
    build: Path,
    source: Any,
    report: Callable[[int], None],
    equal: EqualRanks,
    watch: Watch,
) -> list[TracedRank]:
    """Trace one tensor parallel rank; return its pipeline stages."""
    start = time.monotonic()
    with _weightless(), UntouchedZeros():
        built = _build(request, rank)
    stages = equal.of(built, watch)
    if stages:
        report(len(request.buckets) - 1)
    else:
        watch.tracing = True
        stages = one_rank.trace_buckets(request, built, report)
        equal.keep(built, watch, stages)
    found = []
    read: set[str] = set()
    for graphs in stages:
        layouts = rank_files.layouts(graphs)
        shared = rank_files.shared_names(request, graphs)
        state_layouts = {k: v for k, v in rank_files.state_layouts(graphs).items() if k not in shared}
        _check(graphs, layouts, state_layouts, source)
        read |= {name for layout in [*layouts.values(), *state_layouts.values()] for name in layout.logical_names}
        value, states = _values(request, rank, graphs, layouts, state_layouts, source)
        found.append(rank_files.write_rank(request, graphs, rank, states, value, build, start))
    unused = sorted(set(source.keys()) - read)
    if unused:
        log.info("the checkpoint holds %d tensors that no graph reads: %s", len(unused), ", ".join(unused[:8]))
    return found


def _values(
    request: TraceRequest,
    rank: int,
    graphs: RankGraphs,
    layouts: dict[str, ParamLayout],
    state_layouts: dict[str, ParamLayout],
    source: Any,
) -> tuple[Callable[[WeightSpec], Tensor], dict[str, Tensor]]:
    """Return what reads a weight of the rank, and its states that do not start as zeros."""
    names = set(source.keys())

    def value(spec: WeightSpec) -> Tensor:
        own = graphs.origin[spec.name][1]
        readable = stored_layout(own, layouts, names) if own in layouts else None
        if readable is not None:
            return shard_tensor(source, readable.rank_layout(request.tp_degree, rank), spec.torch_dtype)
        return value_of(graphs, *graphs.origin[spec.name])

    states = rank_files.initial_states(request, graphs)
    for name, layout in state_layouts.items():  # like load_state_dict: the checkpoint's values take precedence
        if set(layout.logical_names) <= names:
            dtype = graphs.states[name].torch_dtype
            states[name] = shard_tensor(source, layout.rank_layout(request.tp_degree, rank), dtype)
    return value, states


def _build(request: TraceRequest, rank: int) -> list[Built]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        return one_rank.build(request, lambda module: _make_fake(module, mode))
    except NxdError:
        raise
    except Exception as error:
        raise TraceError(
            f"func raised {type(error).__name__} for rank {rank}: {error}. With a checkpoint loader parameters have "
            "no values while func runs; a func that reads them needs the mode without a loader",
            rank=rank,
        ) from error


def _check(graphs: RankGraphs, layouts: dict[str, ParamLayout], states: dict[str, ParamLayout], source: Any) -> None:
    """Check that the checkpoint has every parameter that the graphs read or change, with its shape."""
    parameters = {name for b in graphs.built for name, _ in b.module.named_parameters(remove_duplicate=False)}
    stored = set(source.keys())
    needed = {
        name: layout for name, layout in states.items() if name in parameters or set(layout.logical_names) <= stored
    }
    for name, (_, own) in graphs.origin.items():
        known = own if own in layouts else name
        if known not in layouts:
            continue
        if graphs.weights[name].kind == "parameter" or stored_layout(known, layouts, stored) is not None:
            needed[own] = layouts[known]
    ties = {name: entry for name, entry in layouts.items() if entry.alias_of in needed}
    try:
        check_weights({**needed, **ties}, source, strict=False)
    except WeightMismatchError as error:
        error.args = (f"the unsharded weights do not fit the model: {error.args[0]}",)
        raise


@contextlib.contextmanager
def _weightless() -> Iterator[None]:
    """Put parameters of modules built in this thread inside the block on the meta device; buffers stay real."""
    thread = threading.get_ident()
    original = nn.Module.register_parameter

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and threading.get_ident() == thread and not param.is_meta:
            light = getattr(param, "_nxd_weightless", None)
            if light is None:
                light = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
                vars(light).update(vars(param))  # pyright: ignore[reportAttributeAccessIssue]
                param._nxd_weightless = light  # pyright: ignore[reportAttributeAccessIssue]  (keeps ties)
            param = light
        original(self, name, param)

    with _construction:
        nn.Module.register_parameter = register_parameter  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            nn.Module.register_parameter = original


def _make_fake(module: nn.Module, mode: Any) -> None:
    """Replace parameters without memory by fake contiguous CPU tensors; tied ones stay one tensor."""
    made: dict[int, nn.Parameter] = {}
    one_rank.make_contiguous(module)
    for path, child in module.named_modules(remove_duplicate=False):
        for name, param in child._parameters.items():
            if param is None or not param.is_meta:
                continue
            if id(param) not in made:
                with mode:
                    fake = torch.empty(param.shape, dtype=param.dtype, device=HOST)
                made[id(param)] = nn.Parameter(fake, requires_grad=False)
                for key, value in vars(param).items():
                    setattr(made[id(param)], key, value)
            child._parameters[name] = made[id(param)]
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                raise TraceError(
                    f"the buffer {f'{path}.{name}' if path else name!r} was built on the meta device and has no value: "
                    "build the model with real buffers (no torch.device('meta')); its parameters need no memory here"
                )


class _NoCollectives:
    """The transport of a rank that is only exported."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise CollectiveError(
            "a collective ran outside of the model's forward while tracing with a checkpoint loader: all ranks are "
            "traced in one process, so func cannot communicate"
        )

    all_reduce = all_gather = reduce_scatter = broadcast = send = recv = barrier = _refuse

    def close(self) -> None:
        """Do nothing."""


@dataclass
class Measured:
    """Sizes of one rank, computed without memory for parameters."""

    modules: list[nn.Module]
    weight_bytes: int
    state_bytes: int
    largest_tensor_bytes: int
    tensors: int


def measure(request: TraceRequest) -> Measured:
    """Build rank 0 without weights and count its bytes."""
    with _as_rank(request, 0), _weightless(), UntouchedZeros():
        built = _build(request, 0)
    states: dict[str, int] = {}
    weights: dict[str, int] = {}
    for entry in {id(b): b for b in built}.values():
        module = entry.module
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            (states if name in entry.states else weights)[name] = tensor.numel() * tensor.element_size()
    largest = max([*weights.values(), 0])
    return Measured(
        [b.module for b in built], sum(weights.values()), sum(states.values()), largest, len(weights) + len(states)
    )
