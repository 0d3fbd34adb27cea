"""Build one rank's model: a few ranks at a time, optionally on the meta device, with equal logical weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nxd_infer.context import ParallelContext, current_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.modules.stand_in import StandIn
from nxd_infer.parallel_layers.base import parameters_on_meta
from nxd_infer.parallel_layers.sequence_parallel import build_sequence_parallel, is_sequence_parallel_model
from nxd_infer.parallel_state import move_model_to_device
from nxd_infer.pipeline.build import build_stage, fill_modules, keep_stage
from nxd_infer.pipeline.stage import Stage
from nxd_infer.trainer.config import TrainConfig
from nxd_infer.util.devices import (
    HOST,
    generator_states,
    group_exists,
    keeping_generators,
    set_generator_states,
    transport_device,
)

Args = tuple[Any, ...]


def build_model(
    config: TrainConfig, model_fn: Callable[..., nn.Module], args: Args, kwargs: dict, include_buffers: bool = True
) -> tuple[nn.Module, Stage | None]:
    """Call ``model_fn`` in this rank's turn, and put the model on the device of the process group.

    With ``meta_device_init`` it has no values there; ``include_buffers=False`` leaves buffers theirs.

    Of a pipeline, the model is reduced to this rank's stages, which are returned beside it.
    """
    init, context = config.model_init_config, current_context()
    model: nn.Module | None = None
    stage: Stage | None = None

    def make() -> nn.Module:
        made = model_fn(*args, **kwargs)
        if not isinstance(made, nn.Module):
            raise ParallelConfigError(
                f"{getattr(model_fn, '__name__', model_fn)!r} must return a torch.nn.Module, got {type(made).__name__}"
            )
        return made

    with same_random_numbers(context), build_sequence_parallel(config.sequence_parallel):
        for mine in turns(context, init.sequential_move_factor):
            if not mine:
                continue
            if context.pp.degree > 1 and not init.meta_device_init:
                model, stage = build_stage(make, config.pipeline_config, context.pp)
            else:
                light = torch.device("meta") if include_buffers else parameters_on_meta()
                with light if init.meta_device_init else contextlib.nullcontext():
                    model = make()
                fill = init.param_init_fn or config.pipeline_config.param_init_fn
                if context.pp.degree > 1:
                    stage = keep_stage(model, config.pipeline_config, context.pp, fill)
                elif init.meta_device_init:
                    fill_modules(model, fill)
            move_to_transport(model)
    assert model is not None
    wholes = [model, *(one.hidden for one in model.modules() if isinstance(one, StandIn))]
    if config.sequence_parallel and context.tp.degree > 1 and not any(map(is_sequence_parallel_model, wholes)):
        raise ParallelConfigError(
            "sequence_parallel=True, but no layer of the model has sequence_parallel_enabled=True: pass it to its "
            "parallel layers and norms (see nxd_infer.parallel_layers.sequence_parallel), or leave the option out"
        )
    return model, stage


def turns(context: ParallelContext, at_a_time: int) -> Iterator[bool]:
    """Yield once per turn whether it is this rank's. Between turns all ranks wait for each other."""
    if context.world_size <= at_a_time or not group_exists():
        yield True
        return
    for first in range(0, context.world_size, at_a_time):
        try:
            yield first <= context.rank < first + at_a_time
        finally:
            dist.barrier()


@contextlib.contextmanager
def same_random_numbers(context: ParallelContext) -> Iterator[None]:
    """Let every rank draw rank 0's random numbers inside the block, so that all build one model whatever their seeds.

    If all ranks already have the same state, they continue from where building leaves it, like a single process.
    Otherwise every rank gets its own generator back afterwards.
    """
    if context.world_size == 1 or not group_exists():
        yield
        return
    device = transport_device()
    mine = generator_states()
    if device == HOST:  # and an accelerator may be in use on some of the ranks alone
        del mine[1:]
    first = torch.cat(mine).to(device, copy=True)
    dist.broadcast(first, 0)
    differs = torch.tensor([int(not torch.equal(first.cpu(), torch.cat(mine)))], device=device)
    dist.all_reduce(differs, dist.ReduceOp.MAX)
    if not differs.item():
        yield
        return
    with keeping_generators():
        set_generator_states(first.cpu().split([len(state) for state in mine]))
        yield


def move_to_transport(model: nn.Module) -> None:
    """Move the model to the device whose memory the process group communicates; it stays where that is the CPU."""
    device = transport_device()
    if device != HOST:
        move_model_to_device(model, device)
