"""``nxd-infer ckpt diff``: compare two checkpoints of any degrees tensor by tensor, weights and moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nxd_infer.checkpoint.archive import RunsSource
from nxd_infer.checkpoint.load_optimizer import classify
from nxd_infer.checkpoint.neuronx.archive import AnyArchive
from nxd_infer.layout import DictSource, WeightSource

CHUNK = 1 << 22
"""Number of elements compared at a time."""
Kinds = dict[str, WeightSource]
"""Logical tensors by kind: ``"weights"``, ``"exp_avg"``, ``"master"``, ``"step"``, ..."""


def logical_tensors(archive: AnyArchive, weights_only: bool = False) -> Kinds:
    """Return all model tensors of a checkpoint and, unless ``weights_only``, all optimizer tensors."""
    found: Kinds = {}
    if any(archive.parts("model")):
        found["weights"] = RunsSource(archive.pieces("model"))
    if weights_only or not any("pieces" in part and part["pieces"] for _, part in archive.parts("optimizer")):
        return found
    pieces = archive.pieces("optimizer")
    elementwise, single = classify(pieces)
    found |= {key: RunsSource(members, key) for key, members in elementwise.items()}
    numbers: dict[str, dict[str, Tensor]] = {}
    for piece in pieces:
        for key in single.get(id(piece), ()):
            numbers.setdefault(key, {}).setdefault(piece.param, piece.file.read(f"{piece.param}|{key}"))
    return found | {key: DictSource(tensors) for key, tensors in numbers.items()}


@dataclass(frozen=True)
class Difference:
    """How one tensor differs: ``problem`` in its name, shape or dtype, the numbers in its values."""

    kind: str
    name: str
    problem: str = ""
    largest: float = 0.0
    """max |a - b|; infinite if only one of them is finite."""
    relative: float = 0.0
    """``largest`` over the largest absolute value of both."""
    fatal: bool = False
    """Counts at any tolerance."""


def count(first: Kinds, second: Kinds) -> int:
    """Return how many tensors :func:`differences` compares."""
    return sum(len(set(first[kind].keys()) & set(second[kind].keys())) for kind in first.keys() & second.keys())


def differences(first: Kinds, second: Kinds, advance: Callable[[], None] = lambda: None) -> Iterator[Difference]:
    """Yield all differences, with one pair of tensors in memory at a time. Dtypes and values count separately."""
    for kind in [*first, *(kind for kind in second if kind not in first)]:
        a, b = _names(first, kind), _names(second, kind)
        for name in a.keys() | b.keys():
            if name not in a or name not in b:
                yield Difference(kind, name, f"only in {'A' if name in a else 'B'}", fatal=True)
        for name in [name for name in a if name in b]:
            yield from _compare(kind, name, first[kind], second[kind])
            advance()


def _names(kinds: Kinds, kind: str) -> Mapping[str, None]:
    return dict.fromkeys(kinds[kind].keys()) if kind in kinds else {}


def _compare(kind: str, name: str, first: WeightSource, second: WeightSource) -> Iterator[Difference]:
    shapes = first.shape(name), second.shape(name)
    if shapes[0] != shapes[1]:
        yield Difference(kind, name, f"shape {list(shapes[0])} and {list(shapes[1])}", fatal=True)
        return
    a, b = first.read(name), second.read(name)
    problem = "" if a.dtype == b.dtype else f"type {_short(a.dtype)} and {_short(b.dtype)}"
    largest, relative = difference_of(a, b)
    if problem or largest:
        yield Difference(kind, name, problem, largest, relative)


def difference_of(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Return ``(max |a - b|, max |a - b| / max(|a|, |b|))`` in float64; equal infinities and two NaN are equal."""
    if not a.numel() or (a.dtype == b.dtype and a.equal(b)):
        return 0.0, 0.0
    largest, scale = 0.0, 0.0
    for left, right in zip(a.reshape(-1).split(CHUNK), b.reshape(-1).split(CHUNK), strict=True):
        left, right = left.double(), right.double()
        same = (left == right) | (left.isnan() & right.isnan())
        scale = max(scale, *(float(side.abs().nan_to_num(0.0, 0.0, 0.0).max()) for side in (left, right)))
        if not bool(same.all()):
            gap = (left - right).abs().masked_fill(same, 0.0)
            largest = max(largest, float(torch.where(gap.isfinite(), gap, torch.inf).max()))
    return largest, (largest / scale if scale else torch.inf) if largest else 0.0


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
