"""Filling a model that is on the meta device, or only this rank's stages of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.context import Axis
from nxd_infer.errors import ParallelConfigError
from nxd_infer.layout.params import restore_attributes
from nxd_infer.pipeline.options import PipelineOptions
from nxd_infer.pipeline.pipeline import cuts_of
from nxd_infer.pipeline.stage import Stage, find_weights, take_stage
from nxd_infer.pipeline.tracing import say_what_has_no_effect, trace_around_units
from nxd_infer.pipeline.units import find_units
from nxd_infer.util.devices import HOST, transport_device

Fill = Callable[[nn.Module], object]


def keep_stage(model: nn.Module, options: PipelineOptions, pp: Axis, fill: Fill | None) -> Stage:
    """Reduce ``model``, in place, to this rank's stages, and fill what of them is on the meta device.

    So no rank ever holds more than its stages. All weights of the model are drawn all the same, module by module, so
    that the stages are parts of the model that one process would build.
    """
    cuts = cuts_of(model, options, pp.degree)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        fill_modules(model, fill, {id(tensor) for tensor in foreign_tensors(model, cuts, pp)})
    return reduce_to_stage(model, cuts, options, pp)


def foreign_tensors(model: nn.Module, cuts: Sequence[str], pp: Axis) -> list[Tensor]:
    """Return the parameters and buffers of a whole model that other ranks own."""
    weights = find_weights(model, find_units(model, cuts)).values()
    return [
        getattr(model.get_submodule(path), name)
        for weight in weights
        if weight.stage % pp.degree != pp.rank
        for path, name in weight.places[:1]
    ]


def reduce_to_stage(model: nn.Module, cuts: Sequence[str], options: PipelineOptions, pp: Axis) -> Stage:
    """Reduce ``model``, in place, to this rank's stages, after the graph tracing that ``options`` ask for."""
    say_what_has_no_effect(options)
    if options.tracer_cls is not None and pp.degree > 1:
        trace_around_units(model, cuts, options)
    return take_stage(model, cuts, pp.rank, pp.degree)


def fill_modules(model: nn.Module, fill: Fill | None, foreign: Collection[int] = ()) -> None:
    """Allocate and fill the modules of ``model`` one after another; what is ``foreign`` goes back to the meta device.

    All are filled on the host, whose random numbers are those of a model that is built there, and then moved to the
    device of the process group.
    ``fill`` gets every module that directly holds weights; None calls its ``reset_parameters``. Ties and the attributes
    of parameters are kept. Raises ParallelConfigError for a module that has none.
    """
    made: dict[int, Tensor] = {}
    alive: list[Tensor] = []
    """The tensors of the meta device, whose ids are the keys of ``made``."""
    for name, module in model.named_modules():
        slots: list[tuple[dict[str, Any], str, Tensor]] = [
            (table, key, tensor)
            for table in (module._parameters, module._buffers)
            for key, tensor in table.items()
            if tensor is not None and tensor.is_meta
        ]
        if not slots and not module._parameters and not module._buffers:
            continue
        if slots and fill is None and not hasattr(module, "reset_parameters"):
            raise ParallelConfigError(
                f"meta_device_init=True: {name or type(module).__name__} cannot initialise itself (no "
                'reset_parameters); pass model_init_config={"param_init_fn": function of a module}'
            )
        for table, key, tensor in slots:
            table[key] = made[id(tensor)] if id(tensor) in made else _allocated(tensor)
        if fill is not None:
            with torch.no_grad():
                fill(module)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()  # pyright: ignore[reportCallIssue]
        for table, key, tensor in slots:
            if id(tensor) in foreign:
                table[key] = tensor
            else:
                made[id(tensor)] = table[key]
                alive.append(tensor)
    if (device := transport_device()) != HOST:
        for tensor in made.values():
            tensor.data = tensor.data.to(device)
    restore_attributes(model)


def _allocated(tensor: Tensor) -> Tensor:
    made = torch.empty_like(tensor, device=HOST)
    if not isinstance(tensor, nn.Parameter):
        return made
    parameter = nn.Parameter(made, tensor.requires_grad)
    for mark, value in vars(tensor).items():
        setattr(parameter, mark, value)
    return parameter
