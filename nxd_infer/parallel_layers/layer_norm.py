"""Norms that can run on one rank's piece of the sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nxd_infer.parallel_layers.base import DeviceLike, device_of

__all__ = ["LayerNorm", "SequenceParallelWeights", "mark_sequence_parallel"]

Self = TypeVar("Self", bound="SequenceParallelWeights")


def mark_sequence_parallel(*marked: Tensor | nn.Module | None) -> None:
    """Mark replicated parameters, or all of modules, that a tensor-parallel rank uses on its piece of the sequence.

    Their gradients are then partial sums; the optimizers of ``nxd_infer.trainer`` add them up in their step.
    """
    for one in marked:
        for parameter in one.parameters() if isinstance(one, nn.Module) else (one,):
            if parameter is not None:
                parameter.sequence_parallel_enabled = True  # pyright: ignore[reportAttributeAccessIssue]


class SequenceParallelWeights(nn.Module):
    """A module whose own parameters are marked when ``sequence_parallel_enabled`` is set.

    Copies, ``to_empty`` and ``load_state_dict(assign=True)`` replace the parameters; the new ones are marked again.
    """

    sequence_parallel_enabled = False

    def _mark(self) -> None:
        if self.sequence_parallel_enabled:
            mark_sequence_parallel(*self._parameters.values())

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._mark()

    def _apply(self: Self, fn: Callable[..., Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._mark()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark()


class LayerNorm(SequenceParallelWeights, nn.LayerNorm):
    """``nn.LayerNorm``; with ``sequence_parallel_enabled`` its input is this rank's piece of the sequence."""

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        sequence_parallel_enabled: bool = False,
        device: DeviceLike = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ):
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device_of(device), dtype)
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self._mark()
