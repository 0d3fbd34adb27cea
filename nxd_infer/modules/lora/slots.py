"""Adapter slots in a served model: each row of a batch picks one, and loading an adapter compiles nothing.

Every targeted layer gets two tables with one entry per slot, A ``[slots + 1, rank, in]`` and B
``[slots + 1, out, rank]``. ``B[s] A[s] x`` is added to row b's outputs, where s is the slot that the row picked. Slot 0
is "no adapter": it stays zero, and adding zero changes nothing. B includes an adapter's scaling, and lower ranks are
zero-padded.

B is sharded like the layer's outputs and A like its inputs, so that repeated or padded heads have the same factors as
their weights. A row-parallel layer adds each rank's part of the update to its partial sum, before its usual reduction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from nxd_infer.errors import ParallelConfigError
from nxd_infer.layout import AxisPlan, ParamLayout, attach_layout
from nxd_infer.parallel_layers import ColumnParallelLinear, RowParallelLinear, mappings
from nxd_infer.util.options import whole_number

__all__ = ["AdapterRows", "AdapterTables", "add_adapter_slots"]


class AdapterRows:
    """The slot of each row of the current batch, shared by all tables of a model."""

    def __init__(self) -> None:
        self.slot_B: Tensor | None = None

    @contextlib.contextmanager
    def use(self, slot_B: Tensor | None) -> Iterator[None]:
        """Inside the block, let row b of every batch use slot ``slot_B[b]`` (int64 [B]); None: no adapters."""
        self.slot_B = slot_B
        try:
            yield
        finally:
            self.slot_B = None


class AdapterTables(nn.Module):
    """The tables A and B of one layer, initially zero. They are non-persistent buffers with layouts."""

    A: Tensor
    B: Tensor

    def __init__(self, layer: ColumnParallelLinear | RowParallelLinear, slots: int, rank: int, rows: AdapterRows):
        super().__init__()
        self.rows = rows
        columns = isinstance(layer, ColumnParallelLinear)
        into = layer.input_size if columns else layer.input_plan
        out = layer.output_plan if columns else layer.output_size
        self._table("A", (slots + 1, rank, into), layer)
        self._table("B", (slots + 1, out, rank), layer)

    def _table(self, name: str, axes: Sequence[AxisPlan | int], layer: ColumnParallelLinear | RowParallelLinear):
        layout = ParamLayout.of(axes, f"../lora_{name}.weight")  # beside the layer's own weight, as PEFT names it
        zeros = torch.zeros(layout.rank_shape(layer.degree), dtype=layer.weight.dtype)
        self.register_buffer(name, zeros, persistent=False)
        attach_layout(self, name, layout, degree=layer.degree)

    def forward(self, x_BSI: Tensor, y_BSO: Tensor) -> Tensor:
        """Add the updates of the rows' adapters to this rank's outputs ``y`` of the layer for ``x``."""
        if self.rows.slot_B is None:
            return y_BSO
        a_BRI = self.A.index_select(0, self.rows.slot_B)
        b_BOR = self.B.index_select(0, self.rows.slot_B)
        # One operator, whose result is rounded like a linear layer's. A compiler may fuse a plain addition with what
        # follows and round elsewhere, which would change rows without an adapter in bfloat16.
        return torch.baddbmm(y_BSO, torch.bmm(x_BSI, a_BRI.transpose(1, 2)), b_BOR.transpose(1, 2))


def add_adapter_slots(module: nn.Module, targets: Sequence[str], slots: int, rank: int) -> AdapterRows:
    """Add adapter slots to the layers of ``module`` whose last name component is in ``targets``.

    Args:
        module: a model for inference, modified in place; its layers keep their names and weights.
        targets: last name components of ColumnParallelLinear (``gather_output=False``) and RowParallelLinear
            (``input_is_parallel=True``) layers, such as ``q_proj``.
        slots: number of adapters at the same time.
        rank: the largest rank of an adapter.

    Returns the rows, on which the model's forward calls ``use``. Raises ParallelConfigError for wrong arguments.
    """
    for what, value in (("adapter slots", slots), ("the adapters' rank", rank)):
        whole_number(what, value, ParallelConfigError, 1)
    layers = {path: layer for path, layer in module.named_modules() if _takes_slots(layer)}
    names = {path.rpartition(".")[2] for path in layers}
    unknown = [name for name in targets if name not in names]
    if unknown or not targets:
        raise ParallelConfigError(
            f"adapter slots: {f'no layer is named {unknown[0]!r}' if unknown else 'targets is empty'}; "
            f"layers that can have slots are {', '.join(sorted(names)) or 'none'}"
        )
    rows = AdapterRows()
    for path, layer in layers.items():
        if path.rpartition(".")[2] in targets:
            layer.add_module("adapter", AdapterTables(layer, slots, rank, rows))
            if isinstance(layer, RowParallelLinear) and layer.degree > 1:
                layer.reduce_output, layer.skip_bias_add = False, True  # _add_update does both
            layer.register_forward_hook(_add_update)
    return rows


def _takes_slots(layer: nn.Module) -> TypeGuard[ColumnParallelLinear | RowParallelLinear]:
    if isinstance(layer, ColumnParallelLinear):
        return not (layer.gather_output or layer.sequence_parallel_enabled or layer.skip_bias_add)
    if isinstance(layer, RowParallelLinear):
        whole = layer.reduce_output and not layer.skip_bias_add
        return layer.input_is_parallel and whole and not layer.sequence_parallel_enabled
    return False


def _add_update(layer: Any, inputs: tuple[Tensor, ...], output: Any) -> Tensor:
    """Forward hook of a layer: add the update to its outputs, and reduce them if the layer leaves that to the hook."""
    tables: AdapterTables = layer.adapter
    if not (isinstance(layer, RowParallelLinear) and layer.degree > 1):
        return tables(inputs[0], output)
    partial, bias = output
    y = mappings.reduce_from_tensor_model_parallel_region(
        tables(inputs[0], partial), layer.axis, context=layer.context, reduce_dtype=layer.reduce_dtype
    )
    return y if bias is None else y + bias.to(y.dtype)
