"""Read one rank's tensors from logical ones in slices: exactly, and with no more than one tensor in memory."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from nxd_infer.errors import WeightMismatchError
from nxd_infer.layout.params import ParamLayout, weight_layout
from nxd_infer.layout.runs import Block, TensorLayout
from nxd_infer.layout.sources import Weights, as_source, named_tensors

READ_BYTES = 8 << 20
"""Approximate bytes read at a time, which are in memory in addition to the target tensor."""


def shard_tensor(
    source: Weights,
    layout: TensorLayout,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the rank's tensor for ``layout``, a new one of ``dtype`` (default: the source's).

    Reads only the slices that the rank holds.
    """
    source = as_source(source)
    blocks = list(layout.blocks())
    if dtype is None:
        names = [block.name for block in blocks] or [layout.source]
        dtype = source.dtype(names[0]) if names[0] else torch.get_default_dtype()
    out = torch.empty(layout.shape, dtype=dtype, device=device)
    fill_tensor(out, source, layout, blocks)
    return out


def fill_tensor(out: Tensor, source: Weights, layout: TensorLayout, blocks: Sequence[Block] | None = None) -> None:
    """:func:`shard_tensor` into an existing tensor. Raises WeightMismatchError if its shape differs."""
    source = as_source(source)
    if tuple(out.shape) != layout.shape:
        name = layout.source or ", ".join(layout.names)
        raise WeightMismatchError(
            f"{name}: a tensor of shape {tuple(out.shape)} cannot take a layout of shape {layout.shape}",
            mismatched=((name, tuple(out.shape), layout.shape),),
        )
    with torch.no_grad():
        write_fills(out, layout)
        for block in blocks if blocks is not None else layout.blocks():
            for piece in block.pieces(READ_BYTES // source.dtype(block.name).itemsize):
                out[piece.local_slices].copy_(source.read(piece.name, piece.logical_slices))


def write_fills(out: Tensor, layout: TensorLayout) -> None:
    """Write the padding of a rank's tensor."""
    # If two axes have padding, the first one wins, so it is written last.
    for slices, value in reversed(list(layout.fills())):
        out[slices].fill_(_representable(value, out.dtype))


def _representable(value: float, dtype: torch.dtype) -> float:
    """Clamp ``value`` to the range of ``dtype``: a fill with the lowest float32 must not become -inf."""
    if not dtype.is_floating_point or value in (float("inf"), float("-inf")):
        return value
    limits = torch.finfo(dtype)
    return min(max(value, limits.min), limits.max)


def iter_shards(
    layouts: Mapping[str, ParamLayout],
    source: Weights,
    rank: int,
    degree: int,
    dtypes: Mapping[str, torch.dtype] | torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(parameter name, this rank's tensor)`` one by one, holding at most one tensor.

    A tied parameter yields the tensor of its first name again. The caller checks names and shapes
    (:func:`check_weights`).
    """
    source = as_source(source)
    names = set(source.keys())
    shared = {layout.alias_of for layout in layouts.values() if layout.alias_of}
    kept: dict[str, Tensor] = {}
    for name, layout in layouts.items():
        if layout.alias_of:
            yield name, kept[layout.alias_of]
            continue
        readable = stored_layout(name, layouts, names) or layout
        dtype = dtypes.get(name) if isinstance(dtypes, Mapping) else dtypes
        dtype = dtype or source.dtype(readable.logical_names[0])
        tensor = shard_tensor(source, readable.rank_layout(degree, rank), dtype)
        if name in shared:
            kept[name] = tensor
        yield name, tensor


def shard_state_dict(
    module: nn.Module,
    source: Weights,
    rank: int,
    degree: int,
    *,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    ignore: Sequence[str] = (),
) -> dict[str, Tensor]:
    """Return the state dict of ``rank`` for ``module``, from logical weights.

    ``dtype`` None keeps the dtype of each parameter of the module. Every parameter must exist with its logical shape;
    with ``strict`` other names are errors, unless they match a pattern of ``ignore``.
    Raises WeightMismatchError, which lists everything missing, unexpected or of another shape.
    """
    source = as_source(source)
    layouts = weight_layout(module)
    check_weights(layouts, source, strict=strict, ignore=ignore)
    dtypes = dtype or {name: tensor.dtype for name, tensor in named_tensors(module).items()}
    return dict(iter_shards(layouts, source, rank, degree, dtypes))


def load_weights(
    module: nn.Module,
    source: Weights,
    *,
    rank: int,
    degree: int,
    strict: bool = True,
    ignore: Sequence[str] = (),
) -> None:
    """Copy logical weights into the parameters and buffers of ``rank``, one tensor at a time.

    Everything is checked before anything is written. Raises WeightMismatchError like :func:`shard_state_dict`, and if
    the module was not built for ``degree``.
    """
    source = as_source(source)
    layouts = weight_layout(module)
    check_weights(layouts, source, strict=strict, ignore=ignore)
    tensors = named_tensors(module)
    wrong = [
        (name, tuple(tensors[name].shape), layout.rank_shape(degree))
        for name, layout in layouts.items()
        if tuple(tensors[name].shape) != layout.rank_shape(degree)
    ]
    if wrong:
        raise weight_mismatch(f"the module was not built for {degree} ranks", mismatched=wrong)
    names = set(source.keys())
    for name, layout in layouts.items():
        if not layout.alias_of:
            readable = stored_layout(name, layouts, names) or layout
            fill_tensor(tensors[name], source, readable.rank_layout(degree, rank))


def stored_layout(name: str, layouts: Mapping[str, ParamLayout], stored: set[str]) -> ParamLayout | None:
    """Return the layout to read: the tensor's own, or that of its other name if only that is ``stored``; else None."""
    ties = (other for other in layouts.values() if other.alias_of == name)
    return next((one for one in itertools.chain([layouts[name]], ties) if stored.issuperset(one.logical_names)), None)


def check_weights(
    layouts: Mapping[str, ParamLayout], source: Weights, *, strict: bool = True, ignore: Sequence[str] = ()
) -> None:
    """Raise WeightMismatchError unless ``source`` has the logical tensors of ``layouts`` with their shapes."""
    source = as_source(source)
    names = set(source.keys())
    missing: list[str] = []
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    known = {logical for layout in layouts.values() for logical in layout.logical_names}
    for name, layout in layouts.items():
        if layout.alias_of:
            continue
        for logical, shape in (stored_layout(name, layouts, names) or layout).logical_shapes.items():
            if logical not in names:
                missing.append(logical)
            elif source.shape(logical) != shape:
                mismatched.append((logical, source.shape(logical), shape))
    unexpected = {
        name: source.shape(name)
        for name in sorted(names - known if strict else ())
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore)
    }
    if missing or unexpected or mismatched:
        raise weight_mismatch("the weights do not belong to this model", missing, unexpected, mismatched)


Mismatched = Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]
"""Names, with the shapes that there are and those that are expected."""


def weight_mismatch(
    what: str,
    missing: Sequence[str] = (),
    unexpected: Mapping[str, Sequence[int]] | Sequence[str] = (),
    mismatched: Mismatched = (),
) -> WeightMismatchError:
    """Return an error that says ``what`` and lists the names; ``unexpected`` with their shapes, if it has them."""
    shapes = unexpected if isinstance(unexpected, Mapping) else {}
    listed = {
        "missing": missing,
        "of another shape": [
            f"{name} is {list(shape)}, wanted {list(expected)}" for name, shape, expected in mismatched
        ],
        "unexpected": [f"{name} {list(shapes[name])}" if name in shapes else name for name in unexpected],
    }
    for kind, names in listed.items():
        if names:
            more = f", ... ({len(names)} in all)" if len(names) > 12 else ""
            what += f"; {kind}: {', '.join(names[:12])}{more}"
    return WeightMismatchError(what, tuple(missing), tuple(unexpected), tuple(mismatched))
