"""A quantised weight [outputs, inputs] in any format: integers or small floats, and a scale for each block of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from nxd_infer.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nxd_infer.layout.sources import WeightSource

WORD = 32
NO_ACTIVATIONS = "activations are not rounded"


class Format(Protocol):
    """How the weights of a checkpoint are stored."""

    parts: tuple[str, ...]
    """Last name components of the tensors that a quantised layer may have, but its bias."""

    @property
    def notes(self) -> tuple[str, ...]: ...  # what is not done here, although the model's authors do it

    def layers(self, source: WeightSource) -> Iterator[Layer]:
        """Yield the quantised layers. Raises CheckpointError for one whose tensors do not fit."""
        ...


@dataclass(frozen=True)
class Stored:
    """A matrix [rows, columns] as its file holds it."""

    name: str
    bits: int = 0
    """Of integers that are packed into words of int32, the first into the lowest bits; 0: elements of their own."""
    along: int = 1
    """The dimension of the matrix along which they are packed."""
    order: tuple[int, ...] = ()
    """The place in its word of each integer, if not in order."""
    offset: int = 0
    """Is subtracted from each integer."""
    one_less: bool = False
    """Each integer was written as one less, with a borrow from the next in its word for a 0."""
    transposed: bool = False

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Return the shape that the file's tensor has for a matrix of these sizes."""
        sizes = [rows, columns]
        if self.bits:
            sizes[self.along] = -(-sizes[self.along] * self.bits // WORD)
        return tuple(sizes[::-1] if self.transposed else sizes)

    def read(self, source: WeightSource, rows: slice, columns: slice) -> Tensor:
        """Return a part of the matrix; only its words are read."""
        import torch  # slow

        if len(source.shape(self.name)) < 2:  # a scale for all, or one per row
            return source.read(self.name).view(-1, 1)[rows]
        wanted, each = [rows, columns], WORD // (self.bits or WORD)
        start, stop = wanted[self.along].start, wanted[self.along].stop
        wanted[self.along] = slice(start // each, -(-stop // each))
        found = source.read(self.name, wanted[::-1] if self.transposed else wanted)
        found = found.T if self.transposed else found
        if not self.bits:
            return found
        if self.one_less:
            found = found + sum(1 << shift for shift in range(0, WORD, self.bits))
        shifts = torch.tensor(self.order or range(each), dtype=torch.int32) * self.bits
        found = found.unsqueeze(self.along + 1) >> (shifts if self.along else shifts[:, None])
        found = (found & ((1 << self.bits) - 1)).flatten(self.along, self.along + 1)
        return found.narrow(self.along, start % each, stop - start) - self.offset


@dataclass(frozen=True)
class Layer:
    """``(levels - zeros) * scales``, with a zero and a scale for each block of levels."""

    module: str
    shape: tuple[int, int]
    dtype: torch.dtype
    """In which it is computed."""
    block: tuple[int, int]
    """Rows and columns of a block."""
    levels: Stored
    scales: Stored
    zeros: Stored | None = None
    index: str = ""
    """The tensor that says the block of each column, if those of a block need not be neighbours."""

    @property
    def count(self) -> tuple[int, int]:
        """Blocks in each dimension."""
        return -(-self.shape[0] // self.block[0]), -(-self.shape[1] // self.block[1])

    def checked(self, source: WeightSource) -> Layer:
        """Return the layer. Raises CheckpointError if its tensors have other shapes."""
        for one, sizes in ((self.levels, self.shape), (self.scales, self.count), (self.zeros, self.count)):
            found = (*source.shape(one.name), 1, 1)[:2] if one else ()
            if one and found != (wanted := one.shape(*sizes)):
                raise misfit(one.name, f"its shape is {list(found)}, expected {list(wanted)}")
        return self

    def read(self, source: WeightSource, rows: range, columns: range) -> Tensor:
        """Return ``weight[rows, columns]``, dequantised; reads about that part only."""
        blocks = [self._blocks(source, dim, wanted) for dim, wanted in enumerate((rows, columns))]
        (held_rows, _), (held_columns, _) = blocks

        def spread(stored: Stored) -> Tensor:
            found = stored.read(source, held_rows, held_columns).to(self.dtype)
            for dim, (_, index) in enumerate(blocks):  # one for all stays one
                found = found if found.shape[dim] == 1 else found.index_select(dim, index)
            return found

        wanted = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
        found = self.levels.read(source, *wanted).to(self.dtype)
        return (found if self.zeros is None else found - spread(self.zeros)) * spread(self.scales)

    def _blocks(self, source: WeightSource, dim: int, wanted: range) -> tuple[slice, Tensor]:
        """Return the blocks that elements of a dimension belong to, and each one's, counted from the first of them."""
        import torch  # slow

        if dim and self.index:
            blocks = source.read(self.index, (slice(wanted.start, wanted.stop),)).long()
        else:
            blocks = torch.arange(wanted.start, wanted.stop) // self.block[dim]
        first, last = int(blocks.min()), int(blocks.max())
        if first < 0 or last >= self.count[dim]:
            raise misfit(self.index, f"it names group {first if first < 0 else last} of {self.count[dim]}")
        return slice(first, last + 1), blocks - first


def modules(source: WeightSource, part: str) -> list[str]:
    """Return the modules that have the tensor ``part``."""
    names = (name.rpartition(".") for name in source.keys())  # noqa: SIM118  (a source is not a mapping)
    return [module for module, _, own in names if own == part]


def misfit(name: str, what: str) -> CheckpointError:
    return CheckpointError(f"{name}: {what}: the files do not fit their config.json")
