"""This rank and its groups: the rank layout as a pure function, and the immutable ParallelContext over it.

Axes are ordered ``pp, dp, cp, tp``: tp is innermost, so a tensor-parallel group is a run of consecutive ranks.
Experts see the same ranks as ``pp, edp, ep, tp``: the ranks of dp and cp, in pieces of ep that share the experts.

The process has a *default* context (``set_default_context``); ``use_context`` overrides it inside a ``with`` block.
New threads see the default, never another thread's override. Without either, every degree is 1 and nothing is
communicated: no process group, no environment variable.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass

from nxd_infer.errors import ParallelConfigError
from nxd_infer.util.options import whole_number

AXES = ("pp", "dp", "cp", "tp")
EXPERT_AXES = ("edp", "ep")
"""Another view of the ranks of dp and cp: copies of the experts, and ranks that share them."""


@dataclass(frozen=True)
class Axis:
    """One parallel axis, seen from one rank."""

    name: str
    degree: int
    rank: int
    """This rank's index in ``ranks``: 0 <= rank < degree."""
    ranks: tuple[int, ...]
    """Global ranks of the group, in order."""


class AxisGroup(str):
    """The name of an axis, which answers what a ``torch.distributed`` group does, also where there is none."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return current_context().axis(self).ranks

    def size(self) -> int:
        return current_context().axis(self).degree

    def rank(self) -> int:
        return current_context().axis(self).rank

    def name(self) -> str:
        return str(self)


@dataclass(frozen=True)
class RankLayout:
    """The degree of each axis over ``world_size`` ranks, row-major ``[pp, dp, cp, tp]``.

    For experts it is ``[pp, edp, ep, tp]``.
    """

    world_size: int
    pp: int
    dp: int
    cp: int
    tp: int
    ep: int = 1

    @property
    def edp(self) -> int:
        return self.dp * self.cp // self.ep

    def degree(self, axis: str) -> int:
        return getattr(self, axis)

    def stride(self, axis: str) -> int:
        """Return the distance between consecutive ranks of a group on ``axis``."""
        order = ("pp", *EXPERT_AXES, "tp") if axis in EXPERT_AXES else AXES
        inner = order[order.index(axis) + 1 :]
        stride = 1
        for name in inner:
            stride *= self.degree(name)
        return stride

    def axis(self, axis: str, rank: int) -> Axis:
        """Return the group on ``axis`` that contains the global ``rank``."""
        stride, degree = self.stride(axis), self.degree(axis)
        place = rank // stride % degree
        first = rank - place * stride
        return Axis(axis, degree, place, tuple(first + i * stride for i in range(degree)))

    def groups(self, axis: str, order: str = "ascending") -> list[list[int]]:
        """Return every group on ``axis``, sorted by first rank, each in ring order (:func:`ring_order`).

        Ranks themselves are always ascending. With another order, a launcher reads the i-th entry of a group as the
        device for the group's i-th rank, on a row of that many devices.
        """
        groups = sorted({self.axis(axis, rank).ranks for rank in range(self.world_size)})
        places = ring_order(self.degree(axis), order)
        return [[ranks[place] for place in places] for ranks in groups]

    def replica_groups(self) -> list[list[int]]:
        """Return every group of ranks with the same weights: data parallel groups, joined over context parallelism."""
        groups: dict[tuple[int, int], list[int]] = {}
        for rank in range(self.world_size):
            groups.setdefault((self.axis("pp", rank).rank, self.axis("tp", rank).rank), []).append(rank)
        return list(groups.values())


def rank_layout(
    world_size: int,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
) -> RankLayout:
    """Lay ``world_size`` ranks out over the axes; data parallelism gets the remaining factor, which experts share.

    Raises ParallelConfigError if a degree is below 1, if their product does not divide the world, or if that of the
    experts does not divide the data parallel ranks.
    """
    tp, pp, cp = tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size
    ep = expert_model_parallel_size
    for name, value in (("tensor", tp), ("pipeline", pp), ("context", cp), ("expert", ep)):
        whole_number(f"{name} parallel size", value, ParallelConfigError, 1)
    if world_size < 1:
        raise ParallelConfigError(f"world size must be at least 1, got {world_size}")
    product = tp * pp * cp
    if world_size % product:
        fits = [d for d in range(1, world_size + 1) if world_size % (d * pp * cp) == 0]
        raise ParallelConfigError(
            f"tensor x pipeline x context = {tp} x {pp} x {cp} = {product} does not divide the world of "
            f"{world_size} ranks; with these pipeline and context sizes the tensor parallel size can be one of {fits}"
        )
    replicas = world_size // (tp * pp)
    if replicas % ep:
        fits = [d for d in range(1, replicas + 1) if replicas % d == 0]
        raise ParallelConfigError(
            f"the expert parallel size {ep} does not divide the {replicas} data parallel ranks that share the experts; "
            f"it can be one of {fits}"
        )
    return RankLayout(world_size, pp, world_size // product, cp, tp, ep)


RING_ORDERS = ("ascending", "ascending_descending")


def ring_order(degree: int, order: str = "ascending") -> list[int]:
    """Return the order of a group of ``degree`` members around a ring.

    ``"ascending"``: 0, 1, 2, ...: single hops, and one hop back over the whole length, for a closed row of devices.
    ``"ascending_descending"``: 0, 2, 4, ..., 5, 3, 1: up the even positions and down the odd ones, so no hop, not even
    the closing one, is longer than two devices, for an open row.

    Raises ParallelConfigError for another order.
    """
    if order not in RING_ORDERS:
        raise ParallelConfigError(f"a ring's order must be one of {', '.join(map(repr, RING_ORDERS))}, got {order!r}")
    if order == "ascending":
        return list(range(degree))
    return [*range(0, degree, 2), *reversed(range(1, degree, 2))]


@dataclass(frozen=True)
class ParallelContext:
    """An immutable description of one rank: its position on every axis, and the key of its collectives."""

    world_size: int
    rank: int
    layout: RankLayout
    collectives: str = "local"
    """Key into the registry of ``nxd_infer.comm``. A name, so that modules holding a context can be copied."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ParallelConfigError(f"rank {self.rank} is outside the world of {self.world_size} ranks")

    def axis(self, name: str) -> Axis:
        return self.layout.axis(name, self.rank)

    @property
    def tp(self) -> Axis:
        return self.axis("tp")

    @property
    def pp(self) -> Axis:
        return self.axis("pp")

    @property
    def dp(self) -> Axis:
        return self.axis("dp")

    @property
    def cp(self) -> Axis:
        return self.axis("cp")

    @property
    def ep(self) -> Axis:
        return self.axis("ep")

    @property
    def edp(self) -> Axis:
        return self.axis("edp")


def make_context(
    world_size: int = 1,
    rank: int = 0,
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    collectives: str = "local",
) -> ParallelContext:
    """Return a context for ``rank`` of ``world_size``; a pure function that starts nothing."""
    return ParallelContext(world_size, rank, rank_layout(world_size, tp, pp, cp, ep), collectives)


LOCAL = make_context()
"""The context of a process without initialisation: every degree is 1."""

_default: ParallelContext | None = None
_override: contextvars.ContextVar[ParallelContext | None] = contextvars.ContextVar("nxd_context", default=None)


def current_context() -> ParallelContext:
    """Return this thread's override, else the process default, else :data:`LOCAL`."""
    return _override.get() or _default or LOCAL


def default_context() -> ParallelContext | None:
    """Return the process default, or None if ``initialize_model_parallel`` has not run."""
    return _default


def set_default_context(context: ParallelContext | None) -> None:
    global _default
    _default = context


@contextlib.contextmanager
def use_context(context: ParallelContext) -> Iterator[ParallelContext]:
    """Override the current context inside the block, for this thread only."""
    token = _override.set(context)
    try:
        yield context
    finally:
        _override.reset(token)
