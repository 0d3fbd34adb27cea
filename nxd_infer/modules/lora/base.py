"""The base of the LoRA layers: the replicated factor, dropout that is equal on every rank, and merging into the weight.

``layers.py`` has what differs from layer to layer: the product that is added, and what is merged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.context import ParallelContext, current_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.layout import restore_attributes
from nxd_infer.modules.lora.config import LoraConfig
from nxd_infer.parallel_layers import mappings
from nxd_infer.parallel_layers.base import ParallelLayer
from nxd_infer.parallel_layers.initialization import Fill, init_linear_weight

__all__ = ["LoraLayer", "Place", "ReplicatedLinear"]

Place = tuple[ParallelContext, str]
"""A context, and the axis over which a layer is split."""


class ReplicatedLinear(nn.Module):
    """``x W^T`` with the full W ``[size_out, size_in]`` on every rank; ``summed``: see ``layers``."""

    def __init__(self, size_in: int, size_out: int, fill: Fill, place: Place, like: Tensor, summed: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_out, size_in, dtype=like.dtype, device=like.device))
        self.fill, self.summed = fill, summed
        self.context, self.axis = place
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.fill(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if self.summed:
            weight = mappings.copy_to_tensor_model_parallel_region(
                weight, self.axis, context=self.context, reduce_dtype=torch.float32
            )
        return F.linear(x, weight)


class LoraLayer(nn.Module, ABC):
    """A frozen ``base_layer`` and the factors ``lora_A`` and ``lora_B``; exposes the attributes of the base.

    ``paths`` maps the parts of the base ("" if it has only one) to their logical projections in a checkpoint.
    """

    base_layer: nn.Module
    lora_A: nn.Module
    lora_B: nn.Module
    parts: tuple[str, ...] = ("",)
    embedding = False
    """Whether A is a table ``[vocabulary, rank]``, which PEFT stores transposed."""

    def __init__(self, base_layer: nn.Module, config: LoraConfig):
        super().__init__()
        self.base_layer = base_layer
        self.lora_rank, self.scaling, self.dropout = config.lora_rank, config.scaling, config.lora_dropout
        self.init_A: Fill = init_linear_weight
        if config.init_lora_weights == "gaussian":
            self.init_A = _Normal(1 / config.lora_rank)
        self.paths: dict[str, str] = {}
        self.base_weights: dict[str, nn.Parameter] = {}
        """The base's original weights, while merged weights replace them."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_layer":
                raise
            return getattr(super().__getattr__("base_layer"), name)

    @property
    def place(self) -> Place:
        """The context and the axis over which the layer is split."""
        base = self.base_layer
        return (base.context, base.axis) if isinstance(base, ParallelLayer) else (current_context(), "tp")

    def factors(self) -> Iterator[tuple[str, nn.Module, nn.Module]]:
        """Yield the part, A and B of each projection."""
        yield "", self.lora_A, self.lora_B

    def zero_at_first(self) -> Iterator[Tensor]:
        """Yield the factors that a new adapter begins with zeros in: the update is zero as long as they are."""
        for _, a, b in self.factors():
            yield (a if self.embedding else b).get_parameter("weight")

    # --- computation ----------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Any:
        """Return the base's output plus the update."""
        y = self.base_layer(x)
        if self.merged:
            if self.training and torch.is_grad_enabled():
                raise ParallelConfigError("the adapter is merged and would get no gradients: call unmerge() first")
            return y
        if isinstance(y, tuple):  # skip_bias_add
            return self.add(y[0], self.update(x)), *y[1:]
        return self.add(y, self.update(x))

    def update(self, x: Tensor) -> Tensor:
        return self.lora_B(self.lora_A(self.drop(x)))

    def add(self, y: Tensor, update: Tensor) -> Tensor:
        return y + self.scaling * update

    def drop(self, x: Tensor) -> Tensor:
        """Apply dropout with the full input's mask, drawn alike on every rank, whichever piece of it ``x`` is."""
        if not self.training or self.dropout == 0:
            return x
        mask = torch.ones(self.whole_shape(x), dtype=x.dtype, device=x.device)
        return x * self.own_piece(F.dropout(mask, self.dropout))

    def whole_shape(self, x: Tensor) -> list[int]:
        return list(x.shape)

    def own_piece(self, whole: Tensor) -> Tensor:
        return whole

    # --- merging ----------------------------------------------------------------------------------------

    @property
    def merged(self) -> bool:
        return bool(self.base_weights)

    @abstractmethod
    def deltas(self) -> dict[str, Tensor]:
        """Return the updates to this rank's weights, in float32 or wider, by name in ``base_layer``."""

    @torch.no_grad()
    def merged_weights(self) -> dict[str, Tensor]:
        """Return this rank's weights plus the update, rounded once."""
        out = {}
        for name, delta in self.deltas().items():
            weight = self.base_weights.get(name, self.base_layer.get_parameter(name))
            out[name] = (weight.to(delta.dtype) + delta).to(weight.dtype)
        return out

    def merge(self) -> None:
        """Merge the update into the weights and keep the originals, so that ``unmerge`` is exact. Idempotent.

        A tied weight keeps its value in other layers.
        """
        if self.merged:
            return
        for name, merged in self.merged_weights().items():
            self.base_weights[name] = self.base_layer.get_parameter(name)
            self.base_layer.register_parameter(name, nn.Parameter(merged, requires_grad=False))
        restore_attributes(self.base_layer)

    def unmerge(self) -> None:
        """Restore the base's original weights. Does nothing if not merged."""
        for name, weight in self.base_weights.items():
            merged = self.base_layer.get_parameter(name)
            weight.data = weight.data.to(merged.device, merged.dtype)  # both may have been moved meanwhile
            self.base_layer.register_parameter(name, weight)
        self.base_weights = {}
        restore_attributes(self.base_layer)

    def wide(self, factor: nn.Module) -> Tensor:
        weight = factor.get_parameter("weight").detach()
        return weight.to(torch.promote_types(weight.dtype, torch.float32))


class _Normal:
    """Fills a tensor with normal numbers; a class, so that layers can be pickled."""

    def __init__(self, std: float):
        self.std = std

    def __call__(self, weight: Tensor) -> None:
        nn.init.normal_(weight, std=self.std)
