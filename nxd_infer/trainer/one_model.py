"""Whether the ranks hold parts of one model: one that was built elsewhere may be another on each."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nxd_infer.comm import all_reduce
from nxd_infer.context import ParallelContext, current_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.parallel_layers.base import ParallelLayer
from nxd_infer.parallel_layers.grads import is_expert_parallel
from nxd_infer.util.devices import transport_device

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FIX = "build the model in the function that initialize_parallel_model is given"


def require_one_model(model: nn.Module) -> None:
    """Raise ParallelConfigError for a layer that was built for other degrees, or for parameters that differ between the
    data parallel ranks. A collective that reads each parameter once."""
    context = current_context()
    for name, layer in model.named_modules():
        if isinstance(layer, ParallelLayer):
            axis = context.axis(layer.axis)
            if (layer.degree, layer.rank) != (axis.degree, axis.rank):
                raise ParallelConfigError(
                    f"{name or type(layer).__name__!r} was built for rank {layer.rank} of {layer.degree} of the axis "
                    f"{layer.axis!r}, and this is rank {axis.rank} of {axis.degree}: {_FIX}"
                )
    named = [(name, param) for name, param in model.named_parameters() if not param.is_meta]
    for axis, experts in (("dp", False), ("edp", True)):
        _require_equal([one for one in named if is_expert_parallel(one[1]) == experts], context, axis)


def _require_equal(named: list[tuple[str, nn.Parameter]], context: ParallelContext, axis: str) -> None:
    if context.axis(axis).degree == 1 or not named:
        return
    device = transport_device()
    sums = torch.stack([_sum_of_bits(param.detach()).to(device) for _, param in named])
    most = all_reduce(torch.stack([sums, -sums]), context, axis, "max")
    differ = (most[0] != -most[1]).tolist()
    names = [name for (name, _), differs in zip(named, differ, strict=True) if differs]
    if names:
        raise ParallelConfigError(
            f"the data parallel ranks hold different values of {len(names)} parameter(s), such as {names[0]!r}: "
            f"{_FIX}, where all draw the same random numbers, or load the same weights into all"
        )


def _sum_of_bits(values: Tensor) -> Tensor:
    """Return an integer that is the same on every machine, and hardly ever the same for other values."""
    if values.is_complex():
        values = torch.view_as_real(values)
    return values.contiguous().view(-1).view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64)
