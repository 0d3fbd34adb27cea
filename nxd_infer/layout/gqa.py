"""Place query and key/value heads on ranks, exactly for every combination of heads, kv heads and degree.

A rank has ``k`` places for key/value heads and ``g`` query heads for each. A key/value head that serves ``G`` query
heads takes ``ceil(G / g)`` places, so it is replicated if its queries do not fit into one place. Unused places, and
unused query heads in a place, are zeros. Zero query heads are multiplied by zero columns of the output projection, so
the sum over ranks equals the unsharded computation.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from nxd_infer.errors import ShardingError
from nxd_infer.layout.axis_plan import AxisPlan, check_place
from nxd_infer.layout.runs import AxisLayout, Fill, Piece, Run


@dataclass(frozen=True)
class GQAPlan:
    """The number of heads per rank, and the axis plans that place them.

    On a rank, query head ``i`` attends to key/value head ``i // group``.
    """

    heads: int
    kv_heads: int
    degree: int
    heads_per_rank: int
    kv_heads_per_rank: int
    kv_size_multiplier: int = 0

    @property
    def group(self) -> int:
        """Query heads per key/value head on a rank."""
        return self.heads_per_rank // self.kv_heads_per_rank

    @property
    def places(self) -> int:
        """Places of each key/value head over all ranks; more than 1 means replication."""
        return -(-(self.heads // self.kv_heads) // self.group)

    def query_heads(self, rank: int) -> tuple[int | None, ...]:
        """Return the logical query heads of ``rank`` in order; None is a zero head."""
        whole = self.heads // self.kv_heads
        out: list[int | None] = []
        for place in self._places(rank):
            head, part = divmod(place, self.places)
            first = part * self.group
            for i in range(first, first + self.group):
                out.append(head * whole + i if head < self.kv_heads and i < whole else None)
        return tuple(out)

    def key_value_heads(self, rank: int) -> tuple[int | None, ...]:
        """Return the logical key/value heads of ``rank`` in order; None is a zero head."""
        heads = (place // self.places for place in self._places(rank))
        return tuple(head if head < self.kv_heads else None for head in heads)

    def _places(self, rank: int) -> range:
        return range(rank * self.kv_heads_per_rank, (rank + 1) * self.kv_heads_per_rank)

    def q_axis(self, head_dim: int) -> AxisPlan:
        """Return the plan of the query projection's output and of the output projection's input."""
        return GQAAxis(self.heads, self.kv_heads, head_dim, "q", self.kv_size_multiplier)

    def kv_axis(self, head_dim: int) -> AxisPlan:
        """Return the plan of the key and value projections' outputs."""
        return GQAAxis(self.heads, self.kv_heads, head_dim, "kv", self.kv_size_multiplier)


def gqa_plan(heads: int, kv_heads: int, degree: int, *, kv_size_multiplier: int = 0) -> GQAPlan:
    """Place ``heads`` query and ``kv_heads`` key/value heads on ``degree`` ranks.

    Uses the fewest query heads per rank, always ``ceil(heads / degree)``, and then the fewest key/value heads. With
    ``kv_size_multiplier`` the number of key/value heads per rank is ``ceil(kv_heads * kv_size_multiplier / degree)`` if
    that needs no more query heads.

    Raises ShardingError unless ``kv_heads`` divides ``heads``.
    """
    return _search(heads, kv_heads, degree, kv_size_multiplier)


@functools.lru_cache(maxsize=1024)
def _search(heads: int, kv_heads: int, degree: int, kv_size_multiplier: int) -> GQAPlan:
    check_place(degree)
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        divisors = [n for n in range(1, max(heads, 0) + 1) if heads % n == 0]
        raise ShardingError(
            f"{heads} query heads cannot share {kv_heads} key/value heads evenly; kv heads must be one of {divisors}"
        )
    whole = heads // kv_heads
    fewest = -(-heads // degree)

    def fits(k: int) -> bool:
        return fewest % k == 0 and kv_heads * -(-whole // (fewest // k)) <= degree * k

    requested = -(-kv_heads * kv_size_multiplier // degree)
    # One query head per place always fits (heads <= degree * fewest), so the search ends at k = fewest.
    k = requested if requested and fits(requested) else next(k for k in range(1, fewest + 1) if fits(k))
    return GQAPlan(heads, kv_heads, degree, fewest, k, kv_size_multiplier)


@dataclass(frozen=True)
class GQAAxis(AxisPlan):
    """The query or key/value axis of :func:`gqa_plan`, at any degree."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    kind: str
    kv_size_multiplier: int = 0

    @property
    def size(self) -> int:
        return (self.n_heads if self.kind == "q" else self.n_kv_heads) * self.head_dim

    def _runs(self, degree: int, rank: int) -> AxisLayout:
        plan = gqa_plan(self.n_heads, self.n_kv_heads, degree, kv_size_multiplier=self.kv_size_multiplier)
        heads = plan.query_heads(rank) if self.kind == "q" else plan.key_value_heads(rank)
        d = self.head_dim
        pieces: list[Piece] = [Fill(0.0, d) if h is None else Run("", h * d, (h + 1) * d) for h in heads]
        return tuple(pieces)
