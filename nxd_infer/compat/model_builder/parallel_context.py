"""Any rank of a parallel model in one process: ``NxDParallelState``, ``init_on_device``, ``mock_distributed``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nxd_infer.comm.protocol import RefusingCollectives, register_collectives, unregister_collectives
from nxd_infer.context import ParallelContext, current_context, make_context, use_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.parallel_layers.base import parameters_on_meta
from nxd_infer.parallel_state import destroy_model_parallel, model_parallel_is_initialized


class NxDParallelState(contextlib.ExitStack):
    """Inside the block this thread is rank ``rank`` of ``world_size``: layers are built, and sizes are, of that rank.

    No process group is needed and none is made; a collective raises CollectiveError. Blocks may be nested.

    Raises ParallelConfigError for degrees that do not divide the world, and for expert parallelism.
    """

    def __init__(
        self,
        world_size: int = 1,
        rank: int = 0,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        context_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        skip_collective_init: bool = True,
        lnc_size: int = 1,
    ):
        super().__init__()
        for name, value in (("expert_model_parallel_size", expert_model_parallel_size), ("lnc_size", lnc_size)):
            if value != 1:
                raise ParallelConfigError(f"{name}={value!r} is not supported in a traced model: pass 1")
        degrees = {"tp": tensor_model_parallel_size, "pp": pipeline_model_parallel_size, "cp": context_parallel_size}
        key = f"one-process-{id(self)}"
        self.context: ParallelContext = make_context(world_size, rank, **degrees, collectives=key)

    def __enter__(self) -> NxDParallelState:
        key = self.context.collectives
        reason = "one process stands for any rank inside NxDParallelState, and has no peers for a collective"
        register_collectives(key, RefusingCollectives(reason))
        self.callback(unregister_collectives, key)
        self.enter_context(use_context(self.context))
        return self


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

    It is PyTorch's own ``fake`` process group; ``init_process_group`` and ``destroy_process_group`` may be called as
    for a real one. Model parallelism that is initialised inside ends with the block.

    Raises ParallelConfigError if there is a real process group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ParallelConfigError("mock_distributed() stands in for a process group, and this process has a real one")
    begin, end = dist.init_process_group, dist.destroy_process_group

    def nothing(*_: Any, **__: Any) -> None:
        """The group is there until the block ends."""

    begin(backend="fake", rank=rank, world_size=world_size, store=FakeStore())
    dist.init_process_group = dist.destroy_process_group = nothing
    try:
        yield
    finally:
        dist.init_process_group, dist.destroy_process_group = begin, end
        if model_parallel_is_initialized():
            destroy_model_parallel()
        if dist.is_initialized():
            end()


def layers_of(module: nn.Module) -> list[tuple[nn.Module, str, ParallelContext]]:
    """Return the layers that keep the context which they were built in: layer, attribute, context."""
    return [
        (child, name, value)
        for child in module.modules()
        for name, value in vars(child).items()
        if isinstance(value, ParallelContext)
    ]


def context_of(module: nn.Module) -> ParallelContext:
    """Return the context that ``module`` was built in, by its first parallel layer; without one, the current one."""
    return next((context for _, _, context in layers_of(module)), current_context())
