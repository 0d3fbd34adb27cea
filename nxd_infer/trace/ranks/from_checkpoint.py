"""Loader mode: all ranks are traced in this process on parameters without memory, weights come from a checkpoint.

``func`` builds the module of each rank in turn. A parameter loses its memory as soon as the module registers it;
buffers, which hold computed values (rotary frequencies, masks, rank offsets), stay real. For export the parameters
become fake CPU tensors. Each rank's weights are then read from the checkpoint slice by slice and written.

A module with ``nxd_equal_ranks = True`` promises that all ranks have the same graphs, because its forward reads the
rank as data alone (``comm.axis_rank``, a buffer), and tensors that are neither parameters nor buffers are the same on
all. It is exported for the first rank only. With ``spmd_mode`` the first and the last rank are, to be compared.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nxd_infer.artifact.manifest import WeightSpec
from nxd_infer.checkpoint.source import weight_source
from nxd_infer.comm.protocol import RefusingCollectives, register_collectives, unregister_collectives
from nxd_infer.context import make_context, use_context
from nxd_infer.errors import NxdError, TraceError, WeightMismatchError
from nxd_infer.layout import ParamLayout, check_weights, shard_tensor
from nxd_infer.layout.shard import stored_layout
from nxd_infer.parallel_layers.base import parameters_on_meta
from nxd_infer.trace.ranks import one_rank, traced
from nxd_infer.trace.ranks.traced import Built, TracedRank
from nxd_infer.trace.request import TraceRequest
from nxd_infer.util.devices import HOST
from nxd_infer.util.memory import give_back

log = logging.getLogger(__name__)

_ONE_PROCESS = (
    "a collective ran outside of the model's forward while tracing with a checkpoint loader: all ranks are traced in "
    "one process, so func cannot communicate"
)


def trace_ranks_here(request: TraceRequest, build: Path, loader: Callable[[], Any]) -> list[TracedRank]:
    """Trace every rank in this process. Raises TraceError with the rank, WeightMismatchError for the checkpoint."""
    degree, progress = request.options.tp_degree, request.options.report
    try:
        source = weight_source(loader())
    except NxdError:
        raise
    except Exception as error:
        raise TraceError(f"checkpoint_loader_callable raised {type(error).__name__}: {error}") from error
    total = degree * len(request.buckets)
    results: list[TracedRank] = []
    first: list[TracedRank] = []
    """The first rank's pipeline stages, if others may have the same graphs."""
    progress("trace ranks", 0, total, "")
    for rank in range(degree):
        done = rank * len(request.buckets)

        def report(index: int, rank: int = rank, done: int = done) -> None:
            progress("trace ranks", done + index + 1, total, f"rank {rank}: {request.buckets[index].name}")

        with _as_rank(request, rank):
            stages, written = _trace(request, rank, build, source, report, first)
        results += written
        if rank == 0 and (request.options.spmd_mode or _say_equal(stages[0].built)):
            first = stages
        del stages
        gc.collect()  # graphs are cycles; free them before the next rank or the compilers
        give_back()
    del first
    gc.collect()
    progress("trace ranks", total, total, "")
    return sorted(results, key=lambda result: result.rank)


@contextlib.contextmanager
def _as_rank(request: TraceRequest, rank: int) -> Iterator[None]:
    """Make this thread ``rank`` inside the block; a collective that is not being exported is an error."""
    key, options = f"loader-{id(request)}-{rank}", request.options
    register_collectives(key, RefusingCollectives(_ONE_PROCESS))
    tp, pp = options.tp_degree, options.pp_degree
    try:  # as in the first stage: the whole model is built, and split into stages afterwards
        with use_context(make_context(tp * pp, rank, tp=tp, pp=pp, collectives=key)):
            yield
    except NxdError as error:
        if isinstance(error, TraceError) and error.rank is None and options.tp_degree > 1:
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
    first: list[TracedRank],
) -> tuple[list[TracedRank], list[TracedRank]]:
    """Trace one tensor parallel rank; return its pipeline stages, and what others need of them.

    ``first``: the stages of the first rank, whose graphs are taken if the ranks are equal.
    """
    with parameters_on_meta(), UntouchedZeros():
        built = _build(request, rank)
    if first and (_say_equal(built) or rank < request.options.tp_degree - 1):
        stages = [stage.with_modules(built) for stage in first]
        report(len(request.buckets) - 1)
    else:
        stages = one_rank.trace_buckets(request, built, report)
    names, degree = set(source.keys()), request.options.tp_degree
    written = []
    read: set[str] = set()
    for stage in stages:
        layouts = traced.layouts_of(stage)
        shared = traced.shared_names(request, stage)
        state_layouts = {k: v for k, v in traced.state_layouts(stage).items() if k not in shared}
        _check(stage, layouts, state_layouts, source)
        read |= {name for layout in [*layouts.values(), *state_layouts.values()] for name in layout.logical_names}

        def value(spec: WeightSpec, stage: TracedRank = stage, layouts: dict[str, ParamLayout] = layouts) -> Tensor:
            own = stage.origin[spec.name][1]
            readable = stored_layout(own, layouts, names) if own in layouts else None
            if readable is not None:
                return shard_tensor(source, readable.rank_layout(degree, rank), spec.torch_dtype)
            return stage.value(*stage.origin[spec.name])

        states = traced.initial_states(request, stage)
        for name, layout in state_layouts.items():  # like load_state_dict: the checkpoint's values take precedence
            if set(layout.logical_names) <= names:
                states[name] = shard_tensor(source, layout.rank_layout(degree, rank), stage.states[name].torch_dtype)
        written.append(traced.write_rank(request, stage, rank, states, value, build))
    unused = sorted(names - read)
    if unused:
        log.info("the checkpoint holds %d tensors that no graph reads: %s", len(unused), ", ".join(unused[:8]))
    return stages, written


class UntouchedZeros(TorchFunctionMode):
    """Inside the block ``torch.zeros`` creates large CPU tensors whose pages are allocated on first use.

    PyTorch writes its zeros, and so does NumPy where memory is used again. A trace creates the states of every rank
    and reads none, so key/value caches as large as the weights would use memory for nothing.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.zeros or kwargs.keys() - {"size", "dtype", "device"}:
            return func(*args, **kwargs)
        device = torch.device(kwargs.get("device") or torch.get_default_device())
        shape = func(*args, **{**kwargs, "device": "meta"})
        if device.type != HOST.type or shape.nbytes < 2 << 20:
            return func(*args, **kwargs)
        memory = mmap.mmap(-1, shape.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=torch.uint8).view(shape.dtype).view(shape.shape)


def _say_equal(built: list[Built]) -> bool:
    return all(getattr(one.module, "nxd_equal_ranks", False) for one in built)


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


def _check(stage: TracedRank, layouts: dict[str, ParamLayout], states: dict[str, ParamLayout], source: Any) -> None:
    """Check that the checkpoint has every parameter that the graphs read or change, with its shape."""
    parameters = {name for b in stage.built for name, _ in b.module.named_parameters(remove_duplicate=False)}
    stored = set(source.keys())
    needed = {
        name: layout for name, layout in states.items() if name in parameters or set(layout.logical_names) <= stored
    }
    for name, (_, own) in stage.origin.items():
        known = own if own in layouts else name
        if known not in layouts:
            continue
        if stage.weights[name].kind == "parameter" or stored_layout(known, layouts, stored) is not None:
            needed[own] = layouts[known]
    ties = {name: entry for name, entry in layouts.items() if entry.alias_of in needed}
    try:
        check_weights({**needed, **ties}, source, strict=False)
    except WeightMismatchError as error:
        error.args = (f"the unsharded weights do not fit the model: {error.args[0]}",)
        raise


def _make_fake(module: nn.Module, mode: Any) -> None:
    """Replace parameters without memory by fake contiguous CPU tensors; tied ones stay one tensor."""
    fakes: dict[int, nn.Parameter] = {}
    one_rank.make_contiguous(module)
    for path, child in module.named_modules(remove_duplicate=False):
        for name, param in child._parameters.items():
            if param is None or not param.is_meta:
                continue
            if id(param) not in fakes:
                with mode:
                    fake = torch.empty(param.shape, dtype=param.dtype, device=HOST)
                fakes[id(param)] = nn.Parameter(fake, requires_grad=False)
                for key, value in vars(param).items():
                    setattr(fakes[id(param)], key, value)
            child._parameters[name] = fakes[id(param)]
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                raise TraceError(
                    f"the buffer {f'{path}.{name}' if path else name!r} was built on the meta device and has no value: "
                    "build the model with real buffers (no torch.device('meta')); its parameters need no memory here"
                )


def build_without_weights(request: TraceRequest) -> list[Built]:
    """Return the first rank's module for each bucket; its parameters need no memory."""
    with _as_rank(request, 0), parameters_on_meta(), UntouchedZeros():
        return _build(request, 0)
