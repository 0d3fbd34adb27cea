"""Any rank of a parallel model in one process: ``NxDParallelState``, ``init_on_device``, ``mock_distributed``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import DEFAULT, patch

import torch
import torch.distributed as dist
from torch import nn

from nxd_infer.context import ParallelContext, current_context, make_context, use_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.parallel_layers.base import parameters_on_meta
from nxd_infer.parallel_state import destroy_model_parallel, model_parallel_is_initialized


@contextlib.contextmanager
def NxDParallelState(
    world_size: int = 1,
    rank: int = 0,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    skip_collective_init: bool = True,
    lnc_size: int = 1,
) -> Iterator[ParallelContext]:
    """Be rank ``rank`` of ``world_size`` inside the block, in this thread: layers are built for it, and sizes are its.

    There is no process group, so a collective raises NotInitializedError; the last two have no effect. Raises
    ParallelConfigError for degrees that do not divide the world.
    """
    tp, pp, cp = tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size
    with use_context(make_context(world_size, rank, tp=tp, pp=pp, cp=cp, ep=expert_model_parallel_size)) as context:
        yield context


@contextlib.contextmanager
def init_on_device(device: torch.device | str, force_custom_init_on_device: bool = False) -> Iterator[None]:
    """Make the parameters of modules built inside the block on ``device``; with ``"meta"`` buffers keep their values.

    ``force_custom_init_on_device``: accepted; layers never initialise a parameter on the meta device.
    """
    with parameters_on_meta() if torch.device(device).type == "meta" else torch.device(device):
        yield


@contextlib.contextmanager
def mock_distributed(world_size: int, rank: int = 0) -> Iterator[None]:
    """Be ``rank`` of ``world_size`` for ``torch.distributed`` inside the block, where collectives do nothing.

    ``init_process_group`` and ``destroy_process_group`` may be called as for real ranks. Model parallelism that is
    initialised inside ends with the block. Raises ParallelConfigError if there is a real process group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ParallelConfigError("mock_distributed() stands in for a process group, and this process has a real one")
    dist.init_process_group(backend="fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with patch.multiple(dist, init_process_group=DEFAULT, destroy_process_group=DEFAULT):  # until the block ends
            yield
    finally:
        if model_parallel_is_initialized():
            destroy_model_parallel()
        dist.destroy_process_group()


def layers_of(module: nn.Module) -> list[tuple[nn.Module, str, ParallelContext]]:
    """Return the layers that keep the context which they were built in: layer, attribute, context."""
    found = [(child, name, value) for child in module.modules() for name, value in vars(child).items()]
    return [(child, name, value) for child, name, value in found if isinstance(value, ParallelContext)]


def context_of(module: nn.Module) -> ParallelContext:
    """Return the context that ``module`` was built in, by its first parallel layer; without one, the current one."""
    return next((context for _, _, context in layers_of(module)), current_context())
