"""Sizes, ranks and groups of the parallel axes, from the current :class:`~nxd_infer.context.ParallelContext`.

Names follow the API guide's chapter "Parallel Model State". Before ``initialize_model_parallel`` every size is 1 and
every rank is 0, as for the layers; only a ``torch.distributed`` group needs a process group. Nothing is cached: the
results follow the current context, so degrees are never stale after ``destroy_model_parallel``.
"""

from __future__ import annotations

import datetime
import itertools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from nxd_infer import native
from nxd_infer.comm.distributed import DistributedCollectives, leave_at_exit, new_group
from nxd_infer.comm.launched import join_launched_world, launched_world, refuse_lonely_xla
from nxd_infer.comm.protocol import collectives_of, register_collectives, unregister_collectives
from nxd_infer.context import (
    AXES,
    EXPERT_AXES,
    LOCAL,
    AxisGroup,
    ParallelContext,
    RankLayout,
    current_context,
    default_context,
    rank_layout,
    set_default_context,
)
from nxd_infer.errors import NotInitializedError, NxdError, ParallelConfigError
from nxd_infer.layout.params import move_model_to_device
from nxd_infer.util.also_called import also_called
from nxd_infer.util.devices import HOST, group_exists, transport_device

log = logging.getLogger(__name__)

__all__ = [
    "DEFAULT_TIMEOUT", "ParallelGroups", "destroy_model_parallel", "get_context_model_parallel_src_tgt_pairs",
    "get_pipeline_model_parallel_next_rank", "get_pipeline_model_parallel_prev_rank", "get_world_group",
    "get_zero1_sharding_groups", "initialize_model_parallel", "is_global_rank_zero", "model_parallel_is_initialized",
    "move_model_to_device",
]  # fmt: skip

_F = TypeVar("_F", bound=Callable[..., Any])
_keys = (f"distributed-{n}" for n in itertools.count())

TRACE_COLLECTIVES = "trace-ranks"
"""Key of the transport in a rank started by parallel_model_trace, which is already initialised."""
DEFAULT_TIMEOUT = 300.0
"""Seconds a rank waits for its peers in a collective over torch.distributed."""


class ParallelGroups(NamedTuple):
    """Every group of every axis as global ranks (``initialize_model_parallel(mesh_only=True)``)."""

    tp_groups: list[list[int]]
    dp_groups: list[list[int]]
    pp_groups: list[list[int]]
    ep_model_groups: list[list[int]]
    ep_data_groups: list[list[int]]
    cp_groups: list[list[int]]


def _constant(function: _F) -> _F:
    """Let Dynamo call a getter while tracing and treat the result as a constant: it cannot trace ``ContextVar.get``.

    Sets the same mark as ``torch.compiler.assume_constant_result``, without importing Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@also_called(
    "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
    "skip_collective_init lnc_size mesh_only",
    when=lambda given: len(given) > 2,
)
def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    *,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    skip_collective_init: bool = False,
    lnc_size: int = 1,
    timeout: float = DEFAULT_TIMEOUT,
    mesh_only: bool = False,
    shared_memory: bool = True,
) -> ParallelGroups | None:
    """Lay the ranks of the world out over pipeline, data, context and tensor parallel groups, once per process.

    The world is that of ``torch.distributed``. If that is not initialised and a launcher such as torchrun has started
    several processes, or one on a GPU, this creates the process group: gloo on the CPU, NCCL if each rank has a GPU.
    Without a launcher the world is this process alone. Every rank calls this with the same arguments; data parallelism
    gets the remaining factor. Ranks are ordered ``[pipeline, data, context, tensor]``: a tensor parallel group is a run
    of consecutive ranks.

    ``expert_model_parallel_size``: ranks that share the experts of a mixture, which are data parallel ranks for the
    rest of the model: ``[pipeline, expert data, expert, tensor]``.
    ``lnc_size``: must be 1; physical cores are not combined into logical ones yet.
    ``skip_collective_init``: no effect. The reference runs one collective per group; this package runs none.
    ``timeout``: seconds that a collective waits for its peers before it raises CollectiveTimeoutError, and that the
    ranks of a launcher wait for their process group before NotInitializedError.
    ``mesh_only``: return the groups as lists of ranks and initialise nothing.
    ``shared_memory``: let gloo groups on one host communicate through shared memory, in a fraction of the time, if the
    native operators are built (``nxd_infer.native.load()`` builds them, and so does a trace).

    When the process ends, gloo's groups are destroyed, whoever created them.

    Raises ParallelConfigError for degrees that do not divide the world (they are never clamped), and for a second call
    without ``destroy_model_parallel()``. A rank of ``parallel_model_trace`` is already initialised: requesting the same
    degrees there does nothing.
    """
    if lnc_size != 1:
        raise ParallelConfigError(f"lnc_size={lnc_size!r} is not supported yet: leave it out, or pass 1")
    sizes = (
        tensor_model_parallel_size,
        pipeline_model_parallel_size,
        context_parallel_size,
        expert_model_parallel_size,
    )
    current = default_context()
    if current is not None and current.collectives == TRACE_COLLECTIVES and not mesh_only:
        degrees = (current.layout.tp, current.layout.pp, current.layout.cp, current.layout.ep)
        if sizes != degrees:
            raise ParallelConfigError(
                f"this process is a rank of parallel_model_trace with (tensor, pipeline, context, expert) = {degrees}; "
                f"func asked for {sizes}: give tp_degree to parallel_model_trace instead"
            )
        return None
    if not mesh_only and current is None:
        join_launched_world(timeout)
        refuse_lonely_xla()
    world, rank = (dist.get_world_size(), dist.get_rank()) if group_exists() else (launched_world(), 0)
    if world == 1 and not group_exists() and any(isinstance(size, int) and size > 1 for size in sizes):
        raise ParallelConfigError(
            f"(tensor, pipeline, context, expert) = {sizes} needs more ranks than this one process: "
            "start them with torchrun, or call torch.distributed.init_process_group() first"
        )
    layout = rank_layout(world, *sizes)
    if mesh_only:
        return ParallelGroups(*(layout.groups(axis) for axis in ("tp", "dp", "pp", "ep", "edp", "cp")))
    if current is not None:
        degrees = ", ".join(f"{axis}={current.layout.degree(axis)}" for axis in (*AXES, "ep"))
        raise ParallelConfigError(
            f"model parallelism is already initialised ({degrees}); call destroy_model_parallel() before changing it"
        )
    if world == 1:
        set_default_context(ParallelContext(1, 0, layout))
        return None
    leave_at_exit()
    context = ParallelContext(world, rank, layout, next(_keys))
    collectives = DistributedCollectives(context, _make_groups(layout, rank, timeout), timeout)
    collectives.exchange_identities(_accelerator())
    if shared_memory:
        collectives.share_memory(_native_library())
    register_collectives(context.collectives, collectives)
    set_default_context(context)
    return None


def _native_library() -> native.NativeLibrary | None:
    """Return the native operators if they are built: training must not wait for a compiler to start."""
    try:
        return native.load() if native.is_built() else None
    except NxdError as error:  # a damaged file, or a cache that others can write to; training works without
        log.warning("ranks communicate over sockets, without the native operators: %s", error)
        return None


def _accelerator() -> torch.device | None:
    return None if (device := transport_device()) == HOST else device


def _make_groups(layout: RankLayout, rank: int, timeout: float) -> dict[str, dist.ProcessGroup]:
    """Create this rank's process group on every axis of a degree above 1. All ranks create all groups, in one order."""
    limit = datetime.timedelta(seconds=timeout)
    own: dict[str, dist.ProcessGroup] = {}
    for axis in AXES if layout.ep == 1 else (*AXES, *EXPERT_AXES):
        if layout.degree(axis) == 1:
            continue
        for ranks in layout.groups(axis):
            group = new_group(ranks, timeout=limit, group_desc=f"nxd_{axis}")
            if rank in ranks and group is not None:
                own[axis] = group  # pyright: ignore[reportArgumentType]
    return own


@_constant
def model_parallel_is_initialized() -> bool:
    """Return whether ``initialize_model_parallel`` has run in this process, or the current context is not LOCAL."""
    return default_context() is not None or current_context() is not LOCAL


def destroy_model_parallel() -> None:
    """Forget the groups, so that ``initialize_model_parallel`` can be called again. Does nothing without groups.

    ``torch.distributed`` itself stays initialised: ending it is up to whoever initialised it.
    """
    context = default_context()
    set_default_context(None)
    if context is not None:
        unregister_collectives(context.collectives)


def _process_group(axis: str) -> Any:
    context = current_context()
    if axis == "edp" and context.ep.degree == context.cp.degree == 1:
        axis = "dp"
    if not group_exists():
        return AxisGroup(axis)
    if default_context() is None and context.world_size == 1:
        raise NotInitializedError(f"call initialize_model_parallel() before asking for the group of axis {axis!r}")
    if context.world_size == 1:
        return dist.group.WORLD
    transport = collectives_of(context)
    return transport.process_group(axis) if isinstance(transport, DistributedCollectives) else AxisGroup(axis)


def _accessors(name: str, axis: str, members: str) -> dict[str, Callable[..., Any]]:
    """Return the functions ``get_NAME_size``, ``_rank``, ..., by their names; ``members`` is what the size counts."""

    def size() -> int:
        return current_context().axis(axis).degree

    def rank() -> int:
        return current_context().axis(axis).rank

    def src_rank() -> int:
        return current_context().axis(axis).ranks[0]

    def group(as_list: bool = False) -> Any:
        return current_context().layout.groups(axis) if as_list else _process_group(axis)

    def replica_groups() -> list[list[int]]:
        return current_context().layout.groups(axis)

    own = name.replace("_", " ").replace(" model", "") + " group"
    texts: dict[Callable[..., Any], str] = {
        _constant(size): f"The number of {members}.",
        _constant(rank): f"This rank's index in its {own}.",
        _constant(src_rank): f"The global rank of the first member of this rank's {own}.",
        group: f"This rank's ``torch.distributed`` {own}, or without one an AxisGroup; with ``as_list`` all, as ranks.",
        replica_groups: f"Every {own} as global ranks.",
    }
    for function, text in texts.items():
        function.__doc__, function.__name__ = text, f"get_{name}_{function.__name__}"
        function.__qualname__ = function.__name__
    return {function.__name__: function for function in texts}


_ACCESSORS = {
    **_accessors("tensor_model_parallel", "tp", "ranks that share each layer"),
    **_accessors("data_parallel", "dp", "copies of the model: the world divided by the other degrees"),
    **_accessors("pipeline_model_parallel", "pp", "pipeline stages"),
    **_accessors("context_parallel", "cp", "ranks that share a sequence"),
    **_accessors("context_model_parallel", "cp", "ranks that share a sequence"),  # the reference's longer name
    **_accessors("expert_model_parallel", "ep", "ranks that share the experts"),
    **_accessors("expert_data_parallel", "edp", "copies of each expert"),
}
globals().update(_ACCESSORS)
__all__ += list(_ACCESSORS)  # pyright: ignore[reportUnsupportedDunderAll]
if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Any]: ...


@_constant
def get_pipeline_model_parallel_next_rank() -> int:
    """The global rank of the next stage; the first stage follows the last."""
    return _neighbour(1)


@_constant
def get_pipeline_model_parallel_prev_rank() -> int:
    """The global rank of the previous stage; the last stage precedes the first."""
    return _neighbour(-1)


def _neighbour(step: int) -> int:
    axis = current_context().pp
    return axis.ranks[(axis.rank + step) % axis.degree]


def get_context_model_parallel_src_tgt_pairs() -> list[list[int]]:
    """Return the ring of every context parallel group, as pairs of a rank and the next one."""
    groups = current_context().layout.groups("cp")
    return [[group[i], group[(i + 1) % len(group)]] for group in groups for i in range(len(group))]


def is_global_rank_zero() -> bool:
    """Return whether this is the first of all ranks."""
    return current_context().rank == 0


def get_zero1_sharding_groups() -> list[list[int]]:
    """Return every group of ranks with the same weights and one ZeRO-1 optimizer state, as global ranks.

    These are the data parallel groups, joined over the context parallel ranks. For ``NeuronZero1Optimizer``.
    """
    return current_context().layout.replica_groups()


def get_world_group(as_list: bool = False) -> Any:
    """The group of all ranks; with ``as_list``, ``[[0, 1, ...]]``.

    Without a group, an AxisGroup if all are tensor parallel ranks, else it raises NotInitializedError.
    """
    context = current_context()
    if as_list:
        return [list(range(context.world_size))]
    if not group_exists():
        if context.tp.degree == context.world_size:
            return AxisGroup("tp")
        raise NotInitializedError("the world group needs torch.distributed.init_process_group(); as_list=True does not")
    return dist.group.WORLD
