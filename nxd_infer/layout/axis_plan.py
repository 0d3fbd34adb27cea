"""AxisPlan: how a logical axis is sharded over the ranks of a tensor-parallel group, at any degree.

A plan stores only the logical size; ``plan.runs(degree, rank)`` computes a rank's piece. All pieces have the same
length, so that all ranks run the same program.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nxd_infer.errors import ParallelConfigError, ShardingError
from nxd_infer.layout.runs import AxisLayout, Fill, Piece, Run, axis_length, coalesce, cut, rename, shift
from nxd_infer.util.options import whole_number


def check_place(degree: int, rank: int = 0) -> None:
    """Raise ParallelConfigError unless ``0 <= rank < degree``."""
    whole_number("a parallel degree", degree, ParallelConfigError, 1)
    if not 0 <= rank < degree:
        raise ParallelConfigError(f"rank {rank} is outside a group of {degree}")


@functools.lru_cache(maxsize=8192)
def _runs_of(plan: AxisPlan, degree: int, rank: int) -> AxisLayout:
    """Return the runs of a plan, cached: plans are values, and every layer of a model uses the same few."""
    check_place(degree, rank)
    return coalesce(plan._runs(degree, rank))


class AxisPlan(abc.ABC):
    """How a logical axis of ``size`` elements is sharded over ranks. Immutable and compared by value."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Number of logical elements, over all parts of a fused axis."""

    @abc.abstractmethod
    def _runs(self, degree: int, rank: int) -> AxisLayout: ...

    @property
    def sharded(self) -> bool:
        """False if every rank holds the whole axis."""
        return True

    @property
    def parts(self) -> dict[str, int]:
        """The logical tensors joined on this axis and their sizes; ``{"": size}`` unless fused."""
        return {"": self.size}

    def exact(self, degree: int) -> bool:
        """Return whether the pieces are as planned, without fallback padding to make them even."""
        return True

    def runs(self, degree: int, rank: int) -> AxisLayout:
        """Return the piece of ``rank``; runs are named "" or, on a fused axis, after their part."""
        return _runs_of(self, degree, rank)

    def local_size(self, degree: int) -> int:
        """Return the number of elements on a rank, including padding; the same on every rank."""
        return axis_length(self.runs(degree, 0))

    def padded_size(self, degree: int) -> int:
        """Return the size of the gathered axis, including padding; the logical size if not sharded."""
        return self.local_size(degree) * (degree if self.sharded else 1)

    def require_exact(self, degree: int, what: str, fix: str = "") -> None:
        """Raise ShardingError if the axis does not divide, with ``what``, the degrees that fit, and the ``fix``."""
        if self.exact(degree):
            return
        fits = [d for d in range(1, max(self.size, 1) + 1) if self.exact(d)]
        shown = ", ".join(map(str, fits[:16])) + (", ..." if len(fits) > 16 else "")
        raise ShardingError(
            f"{what} = {self.size} does not divide over {degree} ranks; use one of the tensor parallel degrees {shown}"
            + (f", {fix}" if fix else "")
            + ", or pad the model with nxd_infer.parallel_layers.pad.pad_model() before its first use"
        )

    def rank_index(self, degree: int, rank: int) -> Tensor:
        """Return int64 [local_size]: the logical index of each local element, ``size`` for padding.

        On a fused axis the parts follow one another in the logical index.
        """
        offsets, at = {}, 0
        for name, length in self.parts.items():
            offsets[name] = at
            at += length
        pieces = [
            torch.arange(offsets[p.name] + p.start, offsets[p.name] + p.stop)
            if isinstance(p, Run)
            else torch.full((p.n,), self.size, dtype=torch.int64)
            for p in self.runs(degree, rank)
        ]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)

    def scatter_index(self, degree: int) -> Tensor | None:
        """Return int64 [padded_size]: the logical index of each element of the gathered axis, ``size`` for padding.

        ``torch.cat([x, zeros(1)])[scatter_index]`` arranges a logical axis for an even split. None if that equals
        ``x``.
        """
        ranks = range(degree) if self.sharded else range(1)
        index = torch.cat([self.rank_index(degree, rank) for rank in ranks])
        return None if torch.equal(index, torch.arange(self.size)) else index

    def gather_index(self, degree: int) -> Tensor | None:
        """Return int64 [size]: the first position of each logical element in the gathered axis. None if in order.

        ``gathered[gather_index]`` is the logical axis: without padding, duplicates taken once.
        """
        index = self.scatter_index(degree)
        if index is None:
            return None
        where = torch.full((self.size + 1,), -1, dtype=torch.int64)
        # Written in reverse, so that the first owner of a duplicated element wins.
        where[index.flip(0)] = torch.arange(index.numel() - 1, -1, -1)
        return where[: self.size]

    def duplicated(self, degree: int) -> bool:
        """Return whether some element is in several places whose gradients are partial sums (KV replication).

        False for a replicated axis: each rank computes the complete gradient.
        """
        if not self.sharded:
            return False
        held = sum(len(p) for rank in range(degree) for p in self.runs(degree, rank) if isinstance(p, Run))
        return held > self.size

    # --- constructors ---------------------------------------------------------------------------------

    @staticmethod
    def replicated(size: int) -> AxisPlan:
        """Every rank holds the whole axis."""
        return Replicated(size)

    @staticmethod
    def held(size: int, start: int, stop: int) -> AxisPlan:
        """Every rank of this group holds ``start..stop``, and ranks of other groups hold the rest: experts."""
        return Held(size, start, stop)

    @staticmethod
    def even(size: int) -> AxisPlan:
        """Equal consecutive pieces. If ``size`` does not divide: rounded up, with padding at the end, and not exact."""
        return Padded(size, 1, 0.0, False)

    @staticmethod
    def padded(size: int, multiple: int = 1, fill: float = 0.0) -> AxisPlan:
        """Consecutive pieces whose size is a multiple of ``multiple``, padding at the end: a padded vocabulary."""
        return Padded(size, multiple, fill, True)

    @staticmethod
    def heads(count: int, head_dim: int) -> AxisPlan:
        """``count`` heads of ``head_dim``: whole heads per rank, zero heads at the end."""
        return Padded(count * head_dim, head_dim, 0.0, True)

    @staticmethod
    def strided(size: int, stride: int) -> AxisPlan:
        """``stride`` consecutive sections of one logical tensor, each split evenly (``partition_stride``)."""
        if stride < 1 or size % stride:
            raise ShardingError(f"a size of {size} does not divide into {stride} sections; stride must divide it")
        return AxisPlan.even(size) if stride == 1 else Sections((AxisPlan.even(size // stride),) * stride)

    @staticmethod
    def sections(plans: Sequence[AxisPlan]) -> AxisPlan:
        """Consecutive sections of ONE logical tensor, each with its own plan (a stored ``[q; k; v]``)."""
        return Sections(tuple(plans))

    @staticmethod
    def fused(parts: Mapping[str, AxisPlan] | Sequence[AxisPlan]) -> AxisPlan:
        """SEVERAL logical tensors joined on one axis: a rank holds its piece of each, in order.

        Keys (or "0", "1", ...) are part names, which ``ParamLayout.sources`` maps to logical tensors.
        """
        named = parts if isinstance(parts, Mapping) else {str(i): plan for i, plan in enumerate(parts)}
        return Fused(tuple(named.items()))

    @staticmethod
    def from_runs(axis: Sequence[Piece]) -> AxisPlan:
        """An explicit padded axis, split evenly over the ranks."""
        return Spelled(coalesce(axis))

    @staticmethod
    def recut(plan: AxisPlan, degree: int) -> AxisPlan:
        """The axis as ``plan`` arranges it at ``degree``, split evenly over any number of ranks."""
        return Recut(plan, degree)


@dataclass(frozen=True)
class Replicated(AxisPlan):
    whole: int

    @property
    def size(self) -> int:
        return self.whole

    @property
    def sharded(self) -> bool:
        return False

    def _runs(self, degree: int, rank: int) -> AxisLayout:
        return (Run("", 0, self.whole),)


@dataclass(frozen=True)
class Held(Replicated):
    start: int
    stop: int

    def _runs(self, degree: int, rank: int) -> AxisLayout:
        return (Run("", self.start, self.stop),)


@dataclass(frozen=True)
class Padded(AxisPlan):
    whole: int
    multiple: int
    fill: float
    wanted: bool
    """Whether padding was requested; if not, it is the fallback for an axis that does not divide."""

    def __post_init__(self) -> None:
        if self.whole < 0 or self.multiple < 1:
            raise ShardingError(f"a size of {self.whole} in multiples of {self.multiple} cannot be laid out")

    @property
    def size(self) -> int:
        return self.whole

    def exact(self, degree: int) -> bool:
        return self.wanted or self.whole % degree == 0

    def _runs(self, degree: int, rank: int) -> AxisLayout:
        local = -(-self.whole // (degree * self.multiple)) * self.multiple
        start = min(rank * local, self.whole)
        stop = min(start + local, self.whole)
        return (Run("", start, stop), Fill(self.fill, local - (stop - start)))


@dataclass(frozen=True)
class Sections(AxisPlan):
    plans: tuple[AxisPlan, ...]

    def __post_init__(self) -> None:
        if any(not plan.sharded or list(plan.parts) != [""] for plan in self.plans):
            raise ShardingError("sections of one tensor must be sharded plans of one tensor each")

    @property
    def size(self) -> int:
        return sum(plan.size for plan in self.plans)

    def exact(self, degree: int) -> bool:
        return all(plan.exact(degree) for plan in self.plans)

    def _runs(self, degree: int, rank: int) -> AxisLayout:
        out: list[Piece] = []
        at = 0
        for plan in self.plans:
            out += shift(plan.runs(degree, rank), at)
            at += plan.size
        return tuple(out)


@dataclass(frozen=True)
class Fused(AxisPlan):
    named: tuple[tuple[str, AxisPlan], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.named]
        if not all(names) or len(set(names)) != len(names):
            raise ShardingError(f"the parts of a fused axis need distinct names, got {names}")
        if any(not plan.sharded or list(plan.parts) != [""] for _, plan in self.named):
            raise ShardingError("the parts of a fused axis must be sharded plans of one tensor each")

    @property
    def size(self) -> int:
        return sum(plan.size for _, plan in self.named)

    @property
    def parts(self) -> dict[str, int]:
        return {name: plan.size for name, plan in self.named}

    def exact(self, degree: int) -> bool:
        return all(plan.exact(degree) for _, plan in self.named)

    def _runs(self, degree: int, rank: int) -> AxisLayout:
        return tuple(piece for name, plan in self.named for piece in rename(plan.runs(degree, rank), name))


@dataclass(frozen=True)
class Spelled(AxisPlan):
    axis: AxisLayout

    @property
    def size(self) -> int:
        return max((p.stop for p in self.axis if isinstance(p, Run)), default=0)

    def exact(self, degree: int) -> bool:
        return axis_length(self.axis) % degree == 0

    def _runs(self, degree: int, rank: int) -> AxisLayout:
        return _even_cut(self.axis, degree, rank)


@dataclass(frozen=True)
class Recut(AxisPlan):
    plan: AxisPlan
    degree: int

    @property
    def size(self) -> int:
        return self.plan.size

    @property
    def parts(self) -> dict[str, int]:
        return self.plan.parts

    def exact(self, degree: int) -> bool:
        return self.plan.padded_size(self.degree) % degree == 0

    def _runs(self, degree: int, rank: int) -> AxisLayout:
        axis = [piece for r in range(self.degree) for piece in self.plan.runs(self.degree, r)]
        return _even_cut(tuple(axis), degree, rank)


def _even_cut(axis: AxisLayout, degree: int, rank: int) -> AxisLayout:
    length = axis_length(axis)
    local = -(-length // degree)
    axis = (*axis, Fill(0.0, local * degree - length))
    return cut(axis, rank * local, (rank + 1) * local)
