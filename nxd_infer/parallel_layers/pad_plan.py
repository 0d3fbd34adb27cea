"""Plan ``pad_model`` before anything changes: which layers belong together, and their new plans.

A row-parallel layer consumes the outputs of the column-parallel layers before it, so all of them must place the same
heads on the same ranks. They are paired by their parent module, in registration order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from nxd_infer.errors import ParallelConfigError, ShardingError
from nxd_infer.layout import AxisPlan, gqa_plan
from nxd_infer.layout.axis_plan import Fused, Sections
from nxd_infer.parallel_layers.base import ParallelLayer
from nxd_infer.parallel_layers.embedding import ParallelEmbedding
from nxd_infer.parallel_layers.linear import ColumnParallelLinear, RowParallelLinear


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
        return any(
            plan.runs(degree, rank) != self.plans[name].runs(degree, rank)
            for name, plan in self.new.items()
            for rank in range(degree)
        )


@dataclass
class Group:
    """The layers whose outputs a row-parallel layer consumes; ``row`` is None for outputs without a consumer."""

    row: Member | None
    outs: list[Member]


def members_of(model: nn.Module) -> list[Member]:
    """Return the layers of ``model`` that padding supports, in registration order."""
    return [member for path, layer in model.named_modules() for member in _member(path, layer)]


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
            groups.append(Group(rows[0], outs))
        elif rows and outs:
            groups += _in_order(together)
        else:
            rest += together
    order = {id(member): i for i, member in enumerate(members)}
    return groups + _in_order(sorted(rest, key=lambda m: order[id(m)]))


def _in_order(members: Sequence[Member]) -> list[Group]:
    groups: list[Group] = []
    waiting: list[Member] = []
    for member in members:
        if member.kind == "in":
            groups.append(Group(member, waiting))
            waiting = []
        else:
            waiting.append(member)
    return groups + ([Group(None, waiting)] if waiting else [])


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
        row, outs = group.row, group.outs
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
        sections = [s for member in outs if not member.is_qkv for s in sections_of(member.plan)]
        if size not in sections:
            return 0
        smaller = [s for s in sections if s < size and s % head_dim == 0 and n % (s // head_dim) == 0]
        found = {s for s in smaller if smaller.count(s) >= 2}
        if len(found) > 1:
            raise ShardingError(
                f"pad_model cannot tell the keys and values of {row.name!r}: beside {n} heads of {head_dim} there are "
                f"projections of {sorted(found)} features. Use GQAQKVColumnParallelLinear for q, k and v"
            )
        return found.pop() // head_dim if found else 0

    def _plan_qkv(self, member: Member, row: Member | None) -> None:
        q_size, kv_size = (member.plans[name].size for name in ("q_plan", "kv_plan"))
        n = self.n_heads
        if q_size % n or kv_size % (q_size // n):
            raise ShardingError(
                f"{member.name!r} projects to {q_size} query and {kv_size} key/value features, which are not whole "
                f"heads when there are n_heads={n} query heads; check n_heads"
            )
        head_dim = q_size // n
        member.settings["head_dim"] = head_dim
        multiplier = getattr(member.layer, "kv_size_multiplier", 1)
        plan = gqa_plan(n, kv_size // head_dim, self.tp_degree, kv_size_multiplier=multiplier)
        q_axis = self._cut(member, plan.q_axis(head_dim))
        member.new = {"q_plan": q_axis, "kv_plan": self._cut(member, plan.kv_axis(head_dim))}
        if row is not None and row.plan.size == q_size:
            row.new["input_plan"] = self._cut(row, plan.q_axis(head_dim))
        elif member.kind == "out" and not _same(q_axis, AxisPlan.heads(n, head_dim), member.layer.degree):
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


def _same(first: AxisPlan, second: AxisPlan, degree: int) -> bool:
    return all(first.runs(degree, rank) == second.runs(degree, rank) for rank in range(degree))


def sections_of(plan: AxisPlan) -> list[int]:
    """Return the sizes of the axis's sections."""
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
