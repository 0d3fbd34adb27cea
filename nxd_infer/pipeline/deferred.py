"""Gradients of linear layers' weights, computed after their backward pass: what fills the bubble of ``"zero-bubble"``.

Source: "Zero Bubble Pipeline Parallelism" (Qi et al., 2023): a stage waits for gradients of activations only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Late = list[tuple[Tensor, Tensor, Tensor]]
"""(weight, input, gradient of the output) of linear layers whose weights still have to get their gradient."""


class DeferredWeights:
    """What takes the weights of linear layers out of autograd's graph, and keeps what their gradients are made of."""

    def __init__(self):
        self.late: Late = []
        """Where the backward pass that runs puts it."""

    @contextlib.contextmanager
    def linears(self) -> Iterator[None]:
        """Let ``F.linear`` take part inside the block, where its weight is a parameter and its input has a gradient."""
        before = F.linear

        def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            own = weight.is_leaf and weight.requires_grad and input.requires_grad and torch.is_grad_enabled()
            if not own or torch.is_autocast_enabled(input.device.type):
                return before(input, weight, bias)
            result = _Linear.apply(input, lambda: weight, before, self)
            return result if bias is None else result + bias

        F.linear = linear
        try:
            yield
        finally:
            F.linear = before


def finish(late: Late) -> None:
    """Add the gradients that were left for later, as a backward pass adds them: hooks of the weights run."""
    for weight, input, gradient in late:
        torch.autograd.backward(weight, _of_weight(input, gradient))
    late.clear()


def _of_weight(input: Tensor, gradient: Tensor) -> Tensor:
    return gradient.flatten(0, -2).T @ input.flatten(0, -2) if input.dim() > 1 else torch.outer(gradient, input)


class _Linear(torch.autograd.Function):
    """A linear layer that autograd knows as a function of its input alone, so the weight's hooks run once."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Callable[[], Tensor], linear: Any, weights: DeferredWeights) -> Tensor:
        ctx.save_for_backward(input)
        ctx.weight, ctx.weights = weight, weights
        return linear(input, weight())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (input,), weight = grad_outputs, ctx.saved_tensors, ctx.weight()
        ctx.weights.late.append((weight, input, gradient))
        return gradient @ weight, None, None, None
