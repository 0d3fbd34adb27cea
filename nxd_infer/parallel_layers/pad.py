"""Pad a model so that its attention heads divide over the ranks, without changing its results.

``pad_model`` works on a model that is already built, sharded and loaded. It rebuilds the logical weights through their
layouts, puts whole heads on every rank (zero heads if there are too few, copies of key/value heads if several ranks
need them), and shards them again. The padded heads are multiplied by zero columns of the output projection.

Source: API guide, "Padding Tensor-Parallel Layers".
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer import comm
from nxd_infer.errors import ParallelConfigError, ShardingError
from nxd_infer.layout import MergedSource, ParamLayout, attach_layout, gqa_plan, layout_of, shard_tensor
from nxd_infer.layout.params import attachment_of
from nxd_infer.parallel_layers.base import ParallelLayer
from nxd_infer.parallel_layers.linear import ColumnParallelLinear, RowParallelLinear
from nxd_infer.parallel_layers.pad_plan import Member, Padder, groups_of, members_of
from nxd_infer.util.options import whole_number

__all__ = ["generate_padding_mask", "get_number_of_extra_heads", "pad_model"]


def get_number_of_extra_heads(n_head: int, tp_degree: int) -> int:
    """Return how many heads to add to ``n_head`` so that it divides over ``tp_degree`` ranks."""
    whole_number("the number of heads", n_head, ParallelConfigError, 1)
    whole_number("the degree", tp_degree, ParallelConfigError, 1)
    return -n_head % tp_degree


class HeadRatio(float):
    """Padded over original heads: a float whose products are exact if they are whole: int(880 * 12/11) is 960."""

    exact: Fraction

    def __new__(cls, padded: int, heads: int) -> HeadRatio:
        self = super().__new__(cls, padded / heads)
        self.exact = Fraction(padded, heads)
        return self

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, int) and (self.exact * other).denominator == 1:
            return float(self.exact * other)
        return super().__mul__(other)

    __rmul__ = __mul__

    def __reduce__(self) -> tuple:
        return HeadRatio, (self.exact.numerator, self.exact.denominator)


def pad_model(
    model: nn.Module,
    tp_degree: int,
    n_heads: int,
    wrapped_classes: Sequence[type] | type = (),
    pad_hook_fn: Callable[[nn.Module, float], object] | None = None,
) -> nn.Module:
    """Pad ``model`` in place for ``n_heads`` attention heads on ``tp_degree`` ranks, and return it.

    Args:
        tp_degree: the model's tensor-parallel degree, or a multiple of it.
        n_heads: query heads of the full, unpadded model.
        wrapped_classes: pad only the parallel layers inside instances of these classes; empty pads all.
        pad_hook_fn: called as ``pad_hook_fn(instance, ratio)`` after padding, with ``ratio`` = padded heads / heads,
            once for every instance of ``wrapped_classes``; without them, for every module that has a padded layer.

    Layers whose outputs stay on the ranks (``gather_output=False``) and the row-parallel layers that consume them get
    their size for the padded number of heads; ``output_size`` and ``input_size`` then include the padding. Layers that
    return or take all features are padded only internally, if their size does not divide.
    Parameters are replaced (create the optimizer afterwards); their attributes and ties are kept.

    Every rank of the group must call it: the weights of changing layers are gathered over the group.
    Raises ShardingError, before anything changes, if heads cannot be placed, and ParallelConfigError if ``tp_degree``
    does not fit the model.
    """
    classes = _classes(wrapped_classes)
    ratio = HeadRatio(n_heads + get_number_of_extra_heads(n_heads, tp_degree), n_heads)
    members = members_of(model)
    wrapped = [module for module in model.modules() if isinstance(module, classes)] if classes else [model]
    if classes and not wrapped:
        names = ", ".join(cls.__name__ for cls in classes)
        warnings.warn(f"pad_model: the model has no instance of {names}, so nothing is padded", stacklevel=2)
    inside = {id(child) for module in wrapped for child in module.modules()}
    chosen = [member for member in members if id(member.layer) in inside]
    _plan(Padder(n_heads, tp_degree), members, inside)
    changing = [member for member in chosen if _changes(member)]
    _check_ties(model, changing)
    moved: dict[int, nn.Parameter] = {}
    for member in changing:
        _apply(member, moved)
    if pad_hook_fn is not None:
        padded = {id(member.layer) for member in chosen}
        for module in wrapped if classes else _holders(model, padded):
            pad_hook_fn(module, ratio)
    return model


def _classes(wrapped_classes: Sequence[type] | type) -> tuple[type, ...]:
    classes = (wrapped_classes,) if isinstance(wrapped_classes, type) else tuple(wrapped_classes)
    for cls in classes:
        if not isinstance(cls, type):
            raise ParallelConfigError(f"wrapped_classes must contain classes, got {cls!r}")
    return classes


def _holders(model: nn.Module, padded: set[int]) -> list[nn.Module]:
    return [module for module in model.modules() if any(id(child) in padded for child in module.children())]


def _plan(padder: Padder, members: Sequence[Member], inside: set[int]) -> None:
    """Decide the new plans of all layers inside, and check that none has a changing counterpart outside."""
    for member in members:
        if member.kind == "own" and id(member.layer) in inside:
            padder.plan_own(member)
    for group in groups_of(members):
        whole = [*group.outs, group.row] if group.row else group.outs
        here = [member for member in whole if id(member.layer) in inside]
        if not here:
            continue
        padder.plan_group(group)
        if len(here) == len(whole):
            continue
        parted = next((m for m in whole if id(m.layer) not in inside and m.moves()), None)
        if parted is not None:
            raise ShardingError(
                f"pad_model: {here[0].name!r} is inside wrapped_classes but its counterpart {parted.name!r} is not, "
                "and both must be padded alike; add the class that contains both"
            )


def _changes(member: Member) -> bool:
    degree = member.layer.degree
    return member.moves() or any(not plan.exact(degree) for plan in member.plans.values())


# --- applying ------------------------------------------------------------------------------------------------


def _new_layouts(member: Member) -> dict[str, ParamLayout]:
    """Return the new layouts of the layer's sharded parameters."""
    layer = member.layer
    try:
        for name, plan in member.new.items():
            setattr(layer, name, plan)
        return {
            name: ParamLayout.of(layer.axes_of(name), dict(old.sources)) for name, old in _old_layouts(layer).items()
        }
    finally:
        for name, plan in member.plans.items():
            setattr(layer, name, plan)


def _old_layouts(layer: ParallelLayer) -> dict[str, ParamLayout]:
    found = {name: layout_of(layer, name) for name, _ in layer.named_parameters(recurse=False)}
    return {name: layout for name, layout in found.items() if layout is not None}


def _check_ties(model: nn.Module, changing: Sequence[Member]) -> None:
    """Raise ShardingError unless all holders of a tied parameter give it the same layout."""
    wanted: dict[int, tuple[str, Any]] = {}
    planned: set[tuple[int, str]] = set()
    for member in changing:
        for name, layout in _new_layouts(member).items():
            degree = member.layer.degree
            key = (f"{member.name}.{name}", [layout.rank_layout(degree, rank).axes for rank in range(degree)])
            planned.add((id(member.layer), name))
            param = member.layer._parameters[name]
            first = wanted.setdefault(id(param), key)
            if first[1] != key[1]:
                raise ShardingError(f"pad_model: {first[0]!r} and {key[0]!r} are tied but would be padded differently")
    for path, module in model.named_modules():
        for name, param in module._parameters.items():
            if id(param) in wanted and (id(module), name) not in planned:
                raise ShardingError(
                    f"pad_model: {wanted[id(param)][0]!r} is tied to {path}.{name}, which is not padded with it"
                )


def _apply(member: Member, moved: dict[int, nn.Parameter]) -> None:
    """Set a layer's new plans, parameters and sizes."""
    layer, new = member.layer, _new_layouts(member)
    old = _old_layouts(layer)
    before = dict(layer.named_parameters(recurse=False))
    attachments = {name: attachment_of(layer, name) for name in new}
    moves = member.moves()
    tensors = {
        name: _recut(layer, before[name], old[name], layout)
        for name, layout in new.items()
        if moves and id(before[name]) not in moved
    }
    for name, value in member.settings.items():
        setattr(layer, name, value)
    layer.replace_parameters(member.new, **tensors)
    for name, layout in new.items():
        if name in tensors:
            moved[id(before[name])] = layer._parameters[name]  # pyright: ignore[reportArgumentType]
        elif moves:
            layer._parameters[name] = moved[id(before[name])]
        for key, value in vars(before[name]).items():
            if key not in vars(layer._parameters[name]):
                setattr(layer._parameters[name], key, value)
        degree, stride = attachments[name]
        attach_layout(layer, name, layout, degree=degree, stride=stride)
    if member.kind == "out" and isinstance(layer, ColumnParallelLinear):
        layer.output_size = layer.output_plan.padded_size(layer.degree)
    if member.kind == "in" and isinstance(layer, RowParallelLinear):
        layer.input_size = layer.input_plan.padded_size(layer.degree)


def _recut(layer: ParallelLayer, param: nn.Parameter, old: ParamLayout, new: ParamLayout) -> Tensor:
    """Return this rank's tensor in the new layout, from all ranks' tensors in the old layout."""
    here = layer.context.axis(layer.axis)
    if param.is_meta or _is_fake(param):
        return param.detach().new_empty(new.rank_shape(here.degree))
    old, new = _neutral(old), _neutral(new)
    gathered = comm.all_gather(param.detach().contiguous().unsqueeze(0), layer.context, layer.axis, 0)
    logical = MergedSource([{"": tensor} for tensor in gathered], {"": old})
    return shard_tensor(logical, new.rank_layout(here.degree, here.rank), param.dtype, param.device)


def _neutral(layout: ParamLayout) -> ParamLayout:
    """Return the layout with the parts' own names, because a layer does not know its place in a model."""
    return replace(layout, sources=tuple((part, part or "whole") for part in layout.parts))


def _is_fake(tensor: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) or isinstance(tensor.data, FakeTensor)


def generate_padding_mask(
    num_heads: int,
    num_heads_with_pad: int,
    num_kv_heads: int | None = None,
    num_kv_heads_with_pad: int | None = None,
    tp_degree: int = 1,
    tp_rank: int = 0,
) -> Tensor:
    """Return bool [num_heads_with_pad / tp_degree]: the query heads of ``tp_rank`` that are real after ``pad_model``.

    Raises ShardingError if ``num_heads_with_pad`` (or ``num_kv_heads_with_pad``, if given) is not the number of heads
    that ``pad_model`` pads to.
    """
    plan = gqa_plan(num_heads, num_kv_heads or num_heads, tp_degree, kv_size_multiplier=1)
    kv_given = num_kv_heads_with_pad is not None
    wanted = (plan.heads_per_rank * tp_degree, plan.kv_heads_per_rank * tp_degree)
    found = (num_heads_with_pad, num_kv_heads_with_pad if kv_given else wanted[1])
    if wanted != found:
        raise ShardingError(
            f"{num_heads} query and {num_kv_heads or num_heads} key/value heads are padded to {wanted[0]} and "
            f"{wanted[1]} on {tp_degree} ranks, not to {found[0]} and {found[1]}"
        )
    return torch.tensor([head is not None for head in plan.query_heads(tp_rank)])
