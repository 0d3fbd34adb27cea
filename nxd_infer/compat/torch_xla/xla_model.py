"""``torch_xla.core.xla_model``.

Collectives are among all ranks, or among this one's list of ``groups``; every rank of it calls. As in torch_xla no
gradient flows through them, ``all_reduce`` of one rank is a copy, whatever the scale, and a list is reduced in place.
``pin_layout``, ``channel_id`` and ``use_global_device_ids`` concern XLA's compiler alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nxd_infer.comm.distributed import REDUCTIONS, DistributedCollectives, as_bytes
from nxd_infer.comm.ops import check_dim, check_divisible
from nxd_infer.compat.torch_xla import runtime
from nxd_infer.compat.torch_xla.host import join
from nxd_infer.compat.torch_xla.steps import add_step_closure, sync
from nxd_infer.compat.utilities import always
from nxd_infer.context import Axis, make_context
from nxd_infer.errors import CollectiveError
from nxd_infer.util.devices import on_host

REDUCE_SUM, REDUCE_MUL, REDUCE_AND, REDUCE_OR, REDUCE_MIN, REDUCE_MAX = "sum", "mul", "and", "or", "min", "max"

mark_step, add_step_closure = sync, add_step_closure
get_local_ordinal, get_ordinal, xrt_world_size = runtime.local_ordinal, runtime.global_ordinal, runtime.world_size
get_memory_info, set_rng_state = runtime.memory_info, runtime.manual_seed
xla_device, xla_device_hw, xla_real_devices = runtime.device, runtime.device_type, runtime.real_devices
is_xla_tensor, get_xla_supported_devices = on_host, always(["xla:0"])
optimization_barrier_ = unlazy = wait_device_ops = always(None)
"""Every operator has run."""


def is_master_ordinal(local: bool = True) -> bool:
    """Return whether this process is the first of its machine, or of all with ``local=False``."""
    return (get_local_ordinal() if local else get_ordinal()) == 0


def master_print(*args: Any, fd: Any = None, local: bool = False, flush: bool = False) -> None:
    if is_master_ordinal(local):
        print(*args, file=fd, flush=flush)


def get_rng_state(device: Any = None) -> int:
    """Return the seed of the CPU's generator."""
    return torch.initial_seed()


# --- collectives ----------------------------------------------------------------------------------------

Groups = Sequence[Sequence[int]] | dist.ProcessGroup | None
_BITWISE = {REDUCE_MUL: torch.mul, REDUCE_AND: torch.bitwise_and, REDUCE_OR: torch.bitwise_or}
_SECONDS = 1800.0
"""How long gloo waits, unless init_process_group() was told otherwise."""
_transports: dict[tuple[int, ...], DistributedCollectives] = {}
_world: Any = None


def _transport(groups: Groups) -> tuple[DistributedCollectives, Axis]:
    """Return the transport among this rank's group, and the group. Raises CollectiveError if it has none."""
    global _world
    join()
    if not dist.is_initialized():
        dist.init_process_group("xla")  # of this process alone
    if _world is not dist.group.WORLD:
        _transports.clear()
        _world = dist.group.WORLD
    if isinstance(groups, dist.ProcessGroup):
        groups = [dist.get_process_group_ranks(groups)]
    here, world = dist.get_rank(), tuple(range(dist.get_world_size()))
    ranks = next((tuple(group) for group in groups if here in group), ()) if groups else world
    if not ranks:
        raise CollectiveError(f"rank {here} calls a collective of the groups {groups}, and is in none of them")
    context = make_context(len(ranks), ranks.index(here), tp=len(ranks))
    if ranks not in _transports:
        group: Any = _world if ranks == world else dist.new_group(list(ranks), use_local_synchronization=True)
        _transports[ranks] = DistributedCollectives(context, {"tp": group}, _SECONDS)
    return _transports[ranks], context.tp


def _reduced(reduce_type: str, x: Tensor, groups: Groups) -> Tensor:
    transport = _transport(groups)[0]
    if reduce_type in REDUCTIONS:
        return transport.all_reduce(x.detach(), "tp", reduce_type)
    if reduce_type not in _BITWISE:
        raise CollectiveError(f"reduce_type {reduce_type!r} is not one of {sorted({*REDUCTIONS, *_BITWISE})}")
    return functools.reduce(_BITWISE[reduce_type], transport.all_gather(x.detach()[None], "tp", 0))


def _each(function: Callable[[Tensor], Tensor], value: Any, output: Any) -> Any:
    """Call ``function`` for a tensor, or each of a list; put the result into ``output``, if there is one."""
    if not isinstance(value, Tensor):
        return [_each(function, x, y) for x, y in zip(value, output or [None] * len(value), strict=True)]
    return function(value) if output is None else output.copy_(function(value))


def _require_pieces(function: str, name: str, x: Tensor, dim: int, count: int, group: Axis) -> None:
    """Raise CollectiveError unless ``count`` is the number of the group's ranks, and divides the dimension."""
    if count != group.degree:
        raise CollectiveError(f"{function}: {name} is {count}, but the group has {group.degree} ranks")
    check_divisible(x, check_dim(x, dim, function), count, function)


def all_reduce(
    reduce_type: str, inputs: Any, scale: float = 1.0, groups: Groups = None, pin_layout: bool = True
) -> Any:
    """Return the reduced tensor, times ``scale``; of a list, reduce the tensors in place and return it.

    One rank alone gets a copy, without the scale, as from torch_xla.
    """
    if isinstance(inputs, Tensor):
        if runtime.world_size() == 1:
            return inputs.clone()
        reduced = _reduced(reduce_type, inputs, groups)
        return reduced if scale == 1.0 else reduced * scale  # counts stay integers
    with torch.no_grad():
        for x in inputs:
            x.copy_(all_reduce(reduce_type, x, scale, groups))
    return inputs


def all_gather(
    value: Any, dim: int = 0, groups: Groups = None, output: Any = None, pin_layout: bool = True, **of_xla: Any
) -> Any:
    """Return the ranks' tensors, one after the other along ``dim``; a list of them for a list."""
    transport = _transport(groups)[0]
    return _each(lambda x: transport.all_gather(x.detach(), "tp", check_dim(x, dim, "all_gather")), value, output)


def reduce_scatter(
    reduce_type: str,
    input: Any,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups = None,
    output: Any = None,
    pin_layout: bool = True,
    **of_xla: Any,
) -> Any:
    """Return this rank's part along ``scatter_dim`` of the reduced tensor, times ``scale``; a list for a list.

    Raises CollectiveError unless ``shard_count`` is the number of the group's ranks, and divides the dimension.
    """

    group = _transport(groups)[1]

    def scatter(x: Tensor) -> Tensor:
        _require_pieces("reduce_scatter", "shard_count", x, scatter_dim, shard_count, group)
        return _reduced(reduce_type, x, groups).chunk(shard_count, scatter_dim)[group.rank] * scale

    return _each(scatter, input, output)


def all_to_all(
    value: Tensor,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: Groups = None,
    pin_layout: bool = True,
) -> Tensor:
    """Send the i-th of ``split_count`` equal pieces along ``split_dimension`` to the group's i-th rank.

    Returns theirs for this rank, one after the other along ``concat_dimension``. Raises CollectiveError as
    :func:`reduce_scatter` does.
    """
    transport, group = _transport(groups)
    _require_pieces("all_to_all", "split_count", value, split_dimension, split_count, group)
    pieces = torch.stack(value.detach().chunk(split_count, split_dimension))
    return torch.cat(transport.all_to_all(pieces, "tp").unbind(), concat_dimension)


def collective_permute(value: Tensor, pairs: Sequence[Sequence[int]]) -> Tensor:
    """Send ``value`` from the first to the second rank of each pair; return what came, or zeros."""
    join()
    here, received = get_ordinal(), torch.zeros_like(value, memory_format=torch.contiguous_format)
    outgoing, incoming = as_bytes(value), as_bytes(received)
    works = []
    for source, target in pairs:
        if source == target == here:
            incoming.copy_(outgoing)
        elif source == here:
            works.append(dist.isend(outgoing, target))
        elif target == here:
            works.append(dist.irecv(incoming, source))
    for work in works:
        work.wait()
    return received


def collective_broadcast(
    tensors: Sequence[Tensor], root_ordinal: int = 0, groups: Groups = None, pin_layout: bool = True
) -> None:
    """Give the tensors the values that they have on rank ``root_ordinal``; zeros in a group without it."""
    with torch.no_grad():
        for x in tensors if get_ordinal() != root_ordinal else ():
            x.zero_()
    all_reduce(REDUCE_SUM, tensors, groups=groups)


def broadcast_master_param(model: nn.Module) -> None:
    """Give the model's parameters and buffers the values that they have on rank 0."""
    collective_broadcast([*model.parameters(), *model.buffers()])


# --- meetings -------------------------------------------------------------------------------------------


def _gather(value: Any, ranks: Sequence[int] | None = None) -> list[Any]:
    sync()
    transport, group = _transport([ranks] if ranks else None)
    found: list[Any] = [None] * group.degree
    dist.all_gather_object(found, value, transport.process_group("tp"))
    return found


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """End the step, wait for all ranks, or the ``replicas``, and return the payload of each, in order."""
    return _gather(payload, replicas)


def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[[list[Any]], Any]) -> Any:
    """Return ``reduce_fn`` of the list of all ranks' data."""
    return reduce_fn(_gather(data))


# --- steps ----------------------------------------------------------------------------------------------


def _fetch_gradients(optimizer: Any) -> list[Tensor]:
    return [param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None]


def reduce_gradients(optimizer: Any, groups: Groups = None, pin_layout: bool = True) -> None:
    """Sum the gradients of the optimizer's parameters over the ranks, or a group, and divide by the world's size."""
    all_reduce(REDUCE_SUM, _fetch_gradients(optimizer), 1.0 / xrt_world_size(), groups)


def optimizer_step(
    optimizer: Any, barrier: bool = False, optimizer_args: Any = None, groups: Groups = None, pin_layout: bool = True
) -> Any:
    """Reduce the gradients and step; ``barrier`` ends the step. Returns what the optimizer's step does."""
    reduce_gradients(optimizer, groups)
    loss = optimizer.step(**(optimizer_args or {}))
    if barrier:
        sync()
    return loss


def save(data: Any, file_or_path: Any, master_only: bool = True, global_master: bool = False) -> None:
    """Save with torch.save(), on the first rank of each machine, of all machines, or on every rank.

    Nobody waits, as in torch_xla: a program that goes on to read the file calls :func:`rendezvous` first.
    """
    if not master_only or is_master_ordinal(local=not global_master):
        torch.save(data, file_or_path)


def _maybe_convert_to_cpu(data: Any, convert: bool = True) -> Any:
    return data


def send_cpu_data_to_device(datas: Any, device: Any, input_sharding: Any = None) -> Any:
    """Return the data, which is where it should be; of one tensor, a list."""
    return [datas] if isinstance(datas, Tensor) else datas
