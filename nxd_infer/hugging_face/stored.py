"""Weights that checkpoints store under another name or layout than our modules."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from nxd_infer.layout import WeightSource


@dataclass(frozen=True)
class StoredWeight:
    """A weight that is one of ``parts`` equal parts of a checkpoint's tensor, along the weight's first dimension.

    "h.*.attn.query.weight": StoredWeight("h.*.attn.c_attn.weight", part=0, parts=3, transposed=True)
    """

    name: str
    """The checkpoint's name; each ``*`` matches the same component as in our name."""
    part: int = 0
    parts: int = 1
    transposed: bool = False
    """The checkpoint holds [inputs, outputs]."""
    fallback: bool = False
    """Only checkpoints that lack the weight hold it under this name: it is written under its own."""

    def shape(self, source: WeightSource, name: str) -> tuple[int, ...]:
        whole = source.shape(name)
        if not whole:
            return whole
        rows, *others = reversed(whole) if self.transposed else whole
        return (rows // self.parts, *others)

    def read(self, source: WeightSource, name: str, slices: Sequence[slice] | None) -> Tensor:
        """Read ``slices`` of the part; reads only these from the file."""
        if self.parts == 1 and not self.transposed:
            return source.read(name, slices)
        shape = self.shape(source, name)
        rows, *others = slices if slices is not None else [slice(None)] * len(shape)
        start, stop, _ = rows.indices(shape[0])
        first = self.part * shape[0]
        wanted = [slice(first + start, first + stop), *others]
        found = source.read(name, wanted[::-1] if self.transposed else wanted)
        return found.T.contiguous() if self.transposed else found


@dataclass(frozen=True)
class StackedWeight(StoredWeight):
    """A weight [E, rows, K] of which the checkpoint holds each expert's matrices [.., K], one below the other in ours.

    "h.*.experts.gate_up": StackedWeight("h.*.experts.0.gate.weight", below=("up",))
    """

    below: tuple[str, ...] = ()
    """Names of the matrices below the one that ``name``, of the first expert's, says."""

    def matrices(self, name: str, expert: int) -> list[str]:
        """Return the checkpoint's names of an expert's matrices."""
        head, _, first = name.rpartition(".0.")
        return [f"{head}.{expert}.{one}.weight" for one in (first.removesuffix(".weight"), *self.below)]

    def shape(self, source: Any, name: str) -> tuple[int, ...]:
        count = next(expert for expert in itertools.count() if source.resolve(self.matrices(name, expert)[0]) is None)
        shapes = [source.shape(one) for one in self.matrices(name, 0)]
        return (count, sum(shape[0] for shape in shapes), *shapes[0][1:])

    def read(self, source: WeightSource, name: str, slices: Sequence[slice] | None) -> Tensor:
        import torch  # slow

        shape = self.shape(source, name)
        experts, rows, *others = slices if slices is not None else [slice(None)] * len(shape)
        start, stop, _ = rows.indices(shape[1])
        wanted: dict[int, list[Tensor]] = {expert: [] for expert in range(*experts.indices(shape[0]))}
        for one, (expert, held) in self.pieces(name, shape).items():
            if expert.start in wanted and start < held.stop and stop > held.start:
                part = slice(max(start, held.start) - held.start, min(stop, held.stop) - held.start)
                wanted[expert.start].append(source.read(one, [part, *others]))
        return torch.stack([torch.cat(parts) for parts in wanted.values()])

    def pieces(self, name: str, shape: Sequence[int]) -> dict[str, tuple[slice, slice]]:
        """Return the checkpoint's names of a weight of ``shape``, and what each holds: of an expert, some rows."""
        height = shape[1] // (1 + len(self.below))
        return {
            one: (slice(expert, expert + 1), slice(place * height, (place + 1) * height))
            for expert in range(shape[0])
            for place, one in enumerate(self.matrices(name, expert))
        }


def matched(pattern: str, name: str, *, any_prefix: bool = False) -> tuple[str, ...] | None:
    """Return what each ``*`` of the pattern matches in ``name``: one component between dots; None without a match."""
    found = re.fullmatch(("(?:.*\\.)?" if any_prefix else "") + re.escape(pattern).replace(r"\*", r"([^.]+)"), name)
    return found.groups() if found else None


def stored_as(name: str, table: Mapping[str, StoredWeight]) -> tuple[str, StoredWeight] | None:
    """Return the checkpoint's name of our ``name``, and how it is stored; None if no pattern of the table matches."""
    for pattern, stored in table.items():
        if (parts := matched(pattern, name)) is not None:
            return stored.name.replace("*", "{}").format(*parts), stored
    return None
