"""Linear layers of which each row has its own: the experts of a mixture.

Shapes: N rows, E experts, O outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nxd_infer.ops.composite import LIBRARY, composite
from nxd_infer.ops.packed import unpack, unpack_int8
from nxd_infer.util.devices import CHECKED


def _fake(x: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    return x.new_empty([x.shape[0], weight.shape[1]])


@composite("expert_linear(Tensor x, Tensor weight, Tensor experts) -> Tensor", _fake)
def expert_linear(x: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    """Return [N, O]: row i is ``weight[experts[i]] @ x[i]``, or zeros where ``experts[i]`` is outside ``0 .. E-1``.

    Use -1 for rows that nobody reads: their experts are then not read either. Differentiable in ``x`` and ``weight``.
    In a graph without an equivalent operator every row reads a copy of its matrix, or every expert computes all rows,
    whichever is less: no shape depends on the values.

    Args:
        x [N, K], weight [E, O, K]: of one dtype. experts [N]: int64.
    """
    N, E = x.shape[0], weight.shape[0]
    if _readable(x):
        y = x.new_zeros(N, weight.shape[1])
        for expert, rows in _rows(experts, E):
            y[rows] = F.linear(x[rows], weight[expert])
        return y
    if N <= E:
        chosen = experts.clamp(0, E - 1)
        y = torch.cat([F.linear(x[i : i + 1], weight.index_select(0, chosen[i : i + 1])[0]) for i in range(N)])
        return torch.where(((experts >= 0) & (experts < E))[:, None], y, 0.0)
    y = x.new_zeros(N, weight.shape[1])
    for expert in range(E):
        y = torch.where((experts == expert)[:, None], F.linear(x, weight[expert]), y)
    return y


@composite("packed_experts(Tensor x, Tensor weight, Tensor experts) -> Tensor", _fake)
def packed_experts(x: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    """Compute :func:`expert_linear` for a packed weight [E, O, K], or [E, O, K + 4] in eight bits.

    The native operator reads the matrices of the experts that have rows, once each, and its results have the bits of
    :func:`~nxd_infer.ops.packed.packed_linears`: a row's do not depend on other rows or the number of threads.
    """
    if weight.dtype != torch.int8:
        return _plain(x, torch.stack([unpack(one) for one in weight]), experts)
    numbers, scales = zip(*(unpack_int8(one) for one in weight), strict=True)
    wide = torch.stack(numbers).float() * torch.stack(scales)[:, :, None]
    return _plain(x.float(), wide, experts).to(x.dtype)


_plain: Callable[..., Tensor] = expert_linear.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]


def _readable(x: Tensor) -> bool:
    """Whether values may decide what is computed: not while a graph is recorded."""
    return type(x) is Tensor and x.device.type in CHECKED


def _rows(experts: Tensor, count: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each expert that has rows, and their numbers."""
    for expert in experts.unique().tolist():
        if 0 <= expert < count:
            yield expert, (experts == expert).nonzero()[:, 0]


# --- gradients ----------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, experts = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    by_x = expert_linear(grad, weight.transpose(1, 2), experts) if wanted[0] else None
    if not wanted[1]:
        return by_x, None, None
    if _readable(x):
        by_weight = torch.zeros_like(weight)
        for expert, rows in _rows(experts, weight.shape[0]):
            torch.mm(grad[rows].T, x[rows], out=by_weight[expert])
        return by_x, by_weight, None
    each = [torch.where((experts == e)[:, None], grad, 0.0).T @ x for e in range(weight.shape[0])]
    return by_x, torch.stack(each), None


torch.library.register_autograd("nxd::expert_linear", _backward, setup_context=_setup, lib=LIBRARY)
