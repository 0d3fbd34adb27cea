"""The closure that a wrapped optimizer is given: it may call it before it changes weights, later, and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nxd_infer.comm import all_reduce
from nxd_infer.context import AXES
from nxd_infer.optimizer.wrapper import OptimizerWrapper
from nxd_infer.util.devices import transport_device


def inner_closure(
    optimizer: OptimizerWrapper, closure: Callable[[], Any], loss: Any, ready: Callable[[], object]
) -> Callable[[], Any]:
    """Return the closure for the optimizer in ``optimizer``.

    Its result is ``loss``, what ``closure`` gave for the present weights, if it is called once and before they change
    (other than through ``.data``), as PyTorch's own optimizers do. Else it is evaluated anew, over all ranks: ``ready``
    makes the gradients final and clips them. With an optimizer that is not PyTorch's own a call is a collective.
    """
    versions = [piece.tensor._version for piece in optimizer.pieces]
    asks_first = type(optimizer.optimizer).__module__.startswith("torch.optim.")
    known = True

    def inner() -> Any:
        nonlocal known
        first, known = known, False
        if first and asks_first:
            return loss
        changed = versions != [piece.tensor._version for piece in optimizer.pieces]
        has_gradients = any(piece.tensor.grad is not None and piece.tensor.grad.any() for piece in optimizer.pieces)
        # A rank may hold no piece, and all must do the same.
        flags = torch.tensor([changed, has_gradients], dtype=torch.int32, device=transport_device())
        for axis in AXES:
            flags = all_reduce(flags, optimizer.context, axis, "max")
        changed, has_gradients = map(bool, flags.tolist())
        if first and not changed:
            return loss
        optimizer.publish()
        if not has_gradients:
            optimizer.zero_grad()  # the optimizer has zeroed its own tensors, which may not be the parameters'
        result = torch.enable_grad()(closure)()
        ready()
        return result

    return inner
