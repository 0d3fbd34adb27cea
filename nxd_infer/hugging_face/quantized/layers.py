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
SCALES = ("float32", "float16", "bfloat16")
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
        found = found.T.contiguous() if self.transposed else found
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
    def count(self) -> tuple[int, int]:  # of blocks in each dimension
        return -(-self.shape[0] // max(1, self.block[0])), -(-self.shape[1] // max(1, self.block[1]))

    def checked(self, source: WeightSource) -> Layer:
        """Return the layer. Raises CheckpointError if its tensors have other shapes or dtypes."""
        for one, sizes in ((self.levels, self.shape), (self.scales, self.count), (self.zeros, self.count)):
            if one is None:
                continue
            found, kind = matrix(source, one.name), str(source.dtype(one.name)).removeprefix("torch.")
            if found != (wanted := one.shape(*sizes)):
                raise misfit(one.name, f"its shape is {list(found)}, expected {list(wanted)}")
            if (one.bits and kind != "int32") or (one is self.scales and kind not in SCALES):
                raise misfit(one.name, f"it is {kind}")
        if self.index and source.shape(self.index) != self.shape[1:]:
            raise misfit(self.index, f"its shape is {list(source.shape(self.index))}, expected [{self.shape[1]}]")
        return self

    def read(self, source: WeightSource, rows: range, columns: range) -> Tensor:
        """Return ``weight[rows, columns]``, dequantised; reads about that part only."""
        import torch  # slow

        wanted = rows, columns
        blocks = [slice(one.start // size, -(-one.stop // size)) for one, size in zip(wanted, self.block, strict=True)]
        index = source.read(self.index, (_slice(columns),)).long() if self.index else None
        if index is not None and torch.equal(index, torch.arange(columns.start, columns.stop) // self.block[1]):
            index = None  # neighbours after all, which is faster
        if index is not None:
            first, last = int(index.min()), int(index.max())
            if first < 0 or last >= self.count[1]:
                raise misfit(self.index, f"it names the groups {first} to {last}, of {self.count[1]}")
            blocks[1] = slice(first, last + 1)

        def spread(stored: Stored) -> Tensor:
            found = stored.read(source, *blocks).to(self.dtype)
            for dim, (part, size, held) in enumerate(zip(wanted, self.block, blocks, strict=True)):
                if found.shape[dim] == 1:  # one for all stays one
                    continue
                if dim and index is not None:
                    found = found.index_select(dim, index - held.start)
                else:
                    found = found.repeat_interleave(size, dim).narrow(dim, part.start - held.start * size, len(part))
            return found

        found = self.levels.read(source, *map(_slice, wanted)).to(self.dtype)
        return (found if self.zeros is None else found - spread(self.zeros)) * spread(self.scales)


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)


def modules(source: WeightSource, part: str) -> list[str]:
    """Return the modules that have the tensor ``part``."""
    names = (name.rpartition(".") for name in source.keys())  # noqa: SIM118  (a source is not a mapping)
    return [module for module, _, own in names if own == part]


def matrix(source: WeightSource, name: str) -> tuple[int, int]:
    """Return the shape of a matrix; a vector is a column."""
    shape = source.shape(name)
    if len(shape) > 2:
        raise misfit(name, f"its shape is {list(shape)}, expected a matrix")
    rows, columns = (*shape, 1, 1)[:2]
    return rows, columns


def misfit(name: str, what: str) -> CheckpointError:
    return CheckpointError(f"{name}: {what}: the files do not fit their config.json")
