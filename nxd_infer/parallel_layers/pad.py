"""Pad a model so that its attention heads divide over the ranks, without changing its results.

``pad_model`` works on a model that is already built, sharded and loaded. It rebuilds the logical weights through their
layouts, puts whole heads on every rank (zero heads if there are too few, copies of key/value heads if several ranks
need them), and shards them again. The padded heads are multiplied by zero columns of the output projection.

Source: API guide, "Padding Tensor-Parallel Layers".
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer import comm
from nxd_infer.errors import ParallelConfigError, ShardingError
from nxd_infer.layout import AxisPlan, MergedSource, ParamLayout, attach_layout, gqa_plan, layout_of, shard_tensor
from nxd_infer.layout.axis_plan import Fused, Sections
from nxd_infer.layout.params import attachment_of
from nxd_infer.layout.runs import AxisLayout
from nxd_infer.parallel_layers.base import ParallelLayer
from nxd_infer.parallel_layers.embedding import ParallelEmbedding
from nxd_infer.parallel_layers.linear import ColumnParallelLinear, RowParallelLinear
from nxd_infer.util.options import whole_number


@dataclass(eq=False)
class Member:
    """A layer to plan for.

    ``kind`` is "out" if its outputs stay on the ranks, "in" if its inputs are already there, else "own".
    """

    path: str
    layer: ParallelLayer
    kind: str
    plans: dict[str, AxisPlan]
    """The layer's current plan attributes."""
    new: dict[str, AxisPlan] = field(default_factory=dict)
    """The new plan attributes."""
    settings: dict[str, int] = field(default_factory=dict)
    """Other attributes of the layer that follow from the plans."""

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def is_qkv(self) -> bool:
        return "kv_plan" in self.plans

    @property
    def plan(self) -> AxisPlan:
        """The plan of a layer that has exactly one."""
        return next(iter(self.plans.values()))

    @property
    def name(self) -> str:
        return self.path or type(self.layer).__name__

    def moves(self) -> bool:
        """Return whether the elements of any rank change."""
        degree = self.layer.degree
        return any(_in_pieces(plan, degree) != _in_pieces(self.plans[name], degree) for name, plan in self.new.items())

    def changes(self) -> bool:
        """Return whether the layer is to be padded."""
        return self.moves() or any(not plan.exact(self.layer.degree) for plan in self.plans.values())


def _in_pieces(plan: AxisPlan, degree: int) -> list[AxisLayout]:
    return [plan.runs(degree, rank) for rank in range(degree)]


Group = tuple[Member | None, list[Member]]
"""A row-parallel layer and those whose outputs it consumes; None for outputs without a consumer."""


def _member(path: str, layer: nn.Module) -> Iterator[Member]:
    if isinstance(layer, ColumnParallelLinear):
        yield Member(path, layer, "own" if layer.gather_output else "out", {"output_plan": layer.output_plan})
    elif isinstance(layer, RowParallelLinear):
        yield Member(path, layer, "in" if layer.input_is_parallel else "own", {"input_plan": layer.input_plan})
    elif isinstance(layer, ParallelEmbedding):
        yield Member(path, layer, "own", {"plan": layer.plan})
    elif isinstance(layer, ParallelLayer) and hasattr(layer, "kv_plan"):
        # GQAQKVColumnParallelLinear, recognised by its plans: this package must not import modules.
        kind = "own" if getattr(layer, "gather_output", False) else "out"
        yield Member(path, layer, kind, {name: getattr(layer, name) for name in ("q_plan", "kv_plan")})
    elif isinstance(layer, ParallelLayer):
        # Convolutions have no heads: their channels are padded if they do not divide.
        plans = {name: getattr(layer, name) for name in ("output_plan", "input_plan") if hasattr(layer, name)}
        if plans:
            yield Member(path, layer, "own", plans)


def groups_of(members: Sequence[Member]) -> list[Group]:
    """Pair every consumer with its producers.

    Within a parent module, a single row-parallel layer takes all outputs; with several, each takes those registered
    since the previous one. The rest (a projection in a separate module, as in BERT) are paired in order over the whole
    model.
    """
    by_parent: dict[str, list[Member]] = {}
    for member in members:
        if member.kind != "own":
            by_parent.setdefault(member.parent, []).append(member)
    groups: list[Group] = []
    rest: list[Member] = []
    for together in by_parent.values():
        rows = [m for m in together if m.kind == "in"]
        outs = [m for m in together if m.kind == "out"]
        if len(rows) == 1 and outs:
            groups.append((rows[0], outs))
        elif rows and outs:
            groups += _in_order(together)
        else:
            rest += together
    return groups + _in_order([member for member in members if member in rest])


def _in_order(members: Sequence[Member]) -> list[Group]:
    groups: list[Group] = []
    waiting: list[Member] = []
    for member in members:
        if member.kind == "in":
            groups.append((member, waiting))
            waiting = []
        else:
            waiting.append(member)
    return groups + ([(None, waiting)] if waiting else [])


@dataclass(frozen=True)
class Padder:
    """Makes plans that place ``n_heads`` whole heads on ``tp_degree`` ranks."""

    n_heads: int
    tp_degree: int

    def plan_own(self, member: Member) -> None:
        """Plan a layer that takes and returns logical features: pad only if its size does not divide."""
        if member.is_qkv:
            self._plan_qkv(member, None)
            return
        for name, plan in member.plans.items():
            member.new[name] = plan if plan.exact(member.layer.degree) else rebuilt(plan, AxisPlan.padded)

    def plan_group(self, group: Group) -> None:
        """Give the consumer and its producers plans that place the same heads on the same ranks."""
        row, outs = group
        if row is None:
            for member in outs:
                self._plan_qkv(member, None) if member.is_qkv else self.plan_own(member)
            return
        kv_heads = self._kv_heads(row, outs)
        size = row.plan.size
        head_dim = size // self.n_heads if size % self.n_heads == 0 else 0
        for member in outs:
            if member.is_qkv:
                self._plan_qkv(member, row)
            else:
                member.new["output_plan"] = self._cut(
                    member, rebuilt(member.plan, lambda s: self._section(s, size, head_dim, kv_heads))
                )
        if "input_plan" not in row.new:
            plan = rebuilt(row.plan, lambda s: self._section(s, size, head_dim, kv_heads))
            row.new["input_plan"] = self._cut(row, plan)

    def _section(self, size: int, consumed: int, head_dim: int, kv_heads: int) -> AxisPlan:
        """Plan one section of a producer's outputs, or of the consumer's ``consumed`` input features."""
        if kv_heads and size == consumed:
            return gqa_plan(self.n_heads, kv_heads, self.tp_degree, kv_size_multiplier=1).q_axis(head_dim)
        if kv_heads and size == kv_heads * head_dim:
            return gqa_plan(self.n_heads, kv_heads, self.tp_degree, kv_size_multiplier=1).kv_axis(head_dim)
        if consumed % self.n_heads == 0 and size % self.n_heads == 0:
            return AxisPlan.heads(self.n_heads, size // self.n_heads)
        # Not made of these heads: an MLP of another size. Producers of a multiple keep their features together.
        return AxisPlan.padded(size, size // consumed if size % consumed == 0 else 1)

    def _kv_heads(self, row: Member, outs: Sequence[Member]) -> int:
        """Return the number of key/value heads of the producers if it is below that of query heads, else 0."""
        size, n = row.plan.size, self.n_heads
        if size % n:
            return 0
        head_dim = size // n
        sections = [s for member in outs if not member.is_qkv for s in _section_sizes(member.plan)]
        if size not in sections:
            return 0
        smaller = [s for s in sections if s < size and s % head_dim == 0 and n % (s // head_dim) == 0]
        sizes = {s for s in smaller if smaller.count(s) >= 2}
        if len(sizes) > 1:
            raise ShardingError(
                f"pad_model cannot tell the keys and values of {row.name!r}: beside {n} heads of {head_dim} there are "
                f"projections of {sorted(sizes)} features. Use GQAQKVColumnParallelLinear for q, k and v"
            )
        return sizes.pop() // head_dim if sizes else 0

    def _plan_qkv(self, member: Member, row: Member | None) -> None:
        q_size, kv_size = (member.plans[name].size for name in ("q_plan", "kv_plan"))
        n = self.n_heads
        if q_size % n or kv_size % (q_size // n):
            raise ShardingError(
                f"{member.name!r} projects to {q_size} query and {kv_size} key/value features, which are not whole "
                f"heads when there are n_heads={n} query heads; check n_heads"
            )
        head_dim, degree = q_size // n, member.layer.degree
        member.settings["head_dim"] = head_dim
        multiplier = getattr(member.layer, "kv_size_multiplier", 1)
        plan = gqa_plan(n, kv_size // head_dim, self.tp_degree, kv_size_multiplier=multiplier)
        q_axis = self._cut(member, plan.q_axis(head_dim))
        member.new = {"q_plan": q_axis, "kv_plan": self._cut(member, plan.kv_axis(head_dim))}
        if row is not None and row.plan.size == q_size:
            row.new["input_plan"] = self._cut(row, plan.q_axis(head_dim))
        elif member.kind == "out" and _in_pieces(q_axis, degree) != _in_pieces(AxisPlan.heads(n, head_dim), degree):
            raise ShardingError(
                f"{member.name!r}: {n} query and {kv_size // head_dim} key/value heads on {self.tp_degree} ranks need "
                f"a RowParallelLinear(input_size={q_size}, input_is_parallel=True) in the same module, because the "
                "query heads are not in order; there is none. Or pass gather_output=True"
            )

    def _cut(self, member: Member, plan: AxisPlan) -> AxisPlan:
        """Return the plan for ``tp_degree`` ranks, on a layer with its own degree."""
        degree = member.layer.degree
        if self.tp_degree % degree:
            raise ParallelConfigError(
                f"pad_model(tp_degree={self.tp_degree}) on {member.name!r}, which is split over {degree} ranks: "
                f"tp_degree must be {degree} or a multiple of it"
            )
        return plan if self.tp_degree == degree else AxisPlan.recut(plan, self.tp_degree)


def _section_sizes(plan: AxisPlan) -> list[int]:
    if isinstance(plan, Sections):
        return [section.size for section in plan.plans]
    return list(plan.parts.values())


def rebuilt(plan: AxisPlan, make: Callable[[int], AxisPlan]) -> AxisPlan:
    """Return an axis with the same sections, each with the plan ``make(size)``."""
    if isinstance(plan, Sections):
        return AxisPlan.sections([make(section.size) for section in plan.plans])
    if isinstance(plan, Fused):
        return AxisPlan.fused({name: make(size) for name, size in plan.parts.items()})
    return make(plan.size)


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
    classes = (wrapped_classes,) if isinstance(wrapped_classes, type) else tuple(wrapped_classes)
    for cls in classes:
        if not isinstance(cls, type):
            raise ParallelConfigError(f"wrapped_classes must contain classes, got {cls!r}")
    ratio = HeadRatio(n_heads + get_number_of_extra_heads(n_heads, tp_degree), n_heads)
    members = [member for path, layer in model.named_modules() for member in _member(path, layer)]
    wrapped = [module for module in model.modules() if isinstance(module, classes)] if classes else [model]
    if classes and not wrapped:
        names = ", ".join(cls.__name__ for cls in classes)
        warnings.warn(f"pad_model: the model has no instance of {names}, so nothing is padded", stacklevel=2)
    inside = {id(child) for module in wrapped for child in module.modules()}
    chosen = [member for member in members if id(member.layer) in inside]
    _plan(Padder(n_heads, tp_degree), members, inside)
    changing = [member for member in chosen if member.changes()]
    _check_ties(model, changing)
    moved: dict[int, nn.Parameter] = {}
    for member in changing:
        _apply(member, moved)
    if pad_hook_fn is not None:
        padded = {id(member.layer) for member in chosen}
        holders = [module for module in model.modules() if padded.intersection(map(id, module.children()))]
        for module in wrapped if classes else holders:
            pad_hook_fn(module, ratio)
    return model


def _plan(padder: Padder, members: Sequence[Member], inside: set[int]) -> None:
    """Decide the new plans of all layers inside, and check that none has a changing counterpart outside."""
    for member in members:
        if member.kind == "own" and id(member.layer) in inside:
            padder.plan_own(member)
    for group in groups_of(members):
        row, outs = group
        whole = [*outs, row] if row else outs
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


# --- applying ------------------------------------------------------------------------------------------------


def _new_layouts(member: Member) -> dict[str, ParamLayout]:
    """Return the new layouts of the layer's sharded parameters."""
    padded = copy.copy(member.layer)
    vars(padded).update(member.new)
    return {name: ParamLayout.of(padded.axes_of(name), dict(old.sources)) for name, old in _old_layouts(padded).items()}


def _old_layouts(layer: ParallelLayer) -> dict[str, ParamLayout]:
    layouts = {name: layout_of(layer, name) for name, _ in layer.named_parameters(recurse=False)}
    return {name: layout for name, layout in layouts.items() if layout is not None}


def _check_ties(model: nn.Module, changing: Sequence[Member]) -> None:
    """Raise ShardingError unless all holders of a tied parameter give it the same layout."""
    new: dict[tuple[int, str], Any] = {}
    for member in changing:
        for name, layout in _new_layouts(member).items():
            ranks = range(member.layer.degree)
            new[id(member.layer), name] = [layout.rank_layout(len(ranks), rank).axes for rank in ranks]
    first: dict[int, tuple[str, Any]] = {}
    for path, module in model.named_modules():
        for name, param in module._parameters.items():
            holder = (f"{path}.{name}", new.get((id(module), name)))
            tied = first.setdefault(id(param), holder)
            if param is not None and tied[1] != holder[1]:
                raise ShardingError(f"pad_model: {tied[0]!r} is tied to {holder[0]!r} but would be padded differently")


def _apply(member: Member, moved: dict[int, nn.Parameter]) -> None:
    """Set a layer's new plans, parameters and sizes; ``moved`` has the new parameters by the old ones' ids."""
    layer, new, old = member.layer, _new_layouts(member), _old_layouts(member.layer)
    attachments = {name: attachment_of(layer, name) for name in new}
    for name, layout in new.items():
        before = layer.get_parameter(name)
        if member.moves() and id(before) not in moved:
            tensor = _recut(layer, before, old[name], layout)
            moved[id(before)] = nn.Parameter(tensor.to(before), requires_grad=before.requires_grad)
            vars(moved[id(before)]).update(vars(before))
    for name, value in {**member.settings, **member.new}.items():
        setattr(layer, name, value)
    layer.plans_changed()
    for name, layout in new.items():
        param = layer.get_parameter(name)
        layer.register_parameter(name, moved.get(id(param), param))
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
    expected = (plan.heads_per_rank * tp_degree, plan.kv_heads_per_rank * tp_degree)
    requested = (num_heads_with_pad, num_kv_heads_with_pad if kv_given else expected[1])
    if expected != requested:
        raise ShardingError(
            f"{num_heads} query and {num_kv_heads or num_heads} key/value heads are padded to {expected[0]} and "
            f"{expected[1]} on {tp_degree} ranks, not to {requested[0]} and {requested[1]}"
        )
    return torch.tensor([head is not None for head in plan.query_heads(tp_rank)])
