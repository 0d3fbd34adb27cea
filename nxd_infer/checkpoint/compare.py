"""Compare two checkpoints of any degrees tensor by tensor, weights and moments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nxd_infer.checkpoint.folder import holds_checkpoint
from nxd_infer.checkpoint.load_optimizer import StoredState
from nxd_infer.checkpoint.neuronx.archive import AnyArchive
from nxd_infer.checkpoint.neuronx.folder import reference_in
from nxd_infer.checkpoint.open import PathLike, open_archive
from nxd_infer.checkpoint.storage import storage_of
from nxd_infer.hugging_face.weights import stored_weights
from nxd_infer.layout import DictSource, WeightSource
from nxd_infer.layout.merge import RunsSource
from nxd_infer.util.dtypes import dtype_name
from nxd_infer.util.progress import Progress, counted, silent

CHUNK = 1 << 22
"""Number of elements compared at a time."""
Kinds = dict[str, WeightSource]
"""Logical tensors by kind: ``"weights"``, ``"exp_avg"``, ``"master"``, ``"step"``, ..."""


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

    def exceeds(self, tolerance: float) -> bool:
        """Whether it counts at this tolerance of ``relative``; another dtype counts at 0 only."""
        return self.fatal or not self.relative <= tolerance or bool(self.problem and not tolerance)


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare_checkpoints`."""

    places: tuple[str, str]
    """Where the two lie."""
    total: int
    """Number of tensors compared."""
    differences: list[Difference]
    """The largest first."""
    optimizers: tuple[bool, bool]
    """Whether each has the state of an optimizer."""


def compare_checkpoints(
    first: PathLike,
    second: PathLike,
    *,
    weights_only: bool = False,
    tags: tuple[str | None, str | None] = (None, None),
    config: PathLike | None = None,
    rules: PathLike | None = None,
    progress: Progress = silent,
) -> Comparison:
    """Compare names, shapes, dtypes and values of two checkpoints, with one pair of tensors in memory at a time.

    Args:
        first, second: as for :func:`~nxd_infer.checkpoint.open.open_archive`, or safetensors with whole weights.
        weights_only: ignore the optimizers' state.
        tags: which checkpoint of each. Default: the newest complete one.
        config, rules: as for :func:`~nxd_infer.checkpoint.open.open_archive`.
        progress: called as ``progress(stage, done, total)``, a step for each pair of tensors.
    """
    kinds: list[Kinds] = []
    places: list[str] = []
    for path, tag in zip((first, second), tags, strict=True):
        weights = None if tag else _plain_weights(path)
        if weights is not None:
            places.append(str(path))
            kinds.append({"weights": weights})
            continue
        archive = open_archive(path, tag, ["model"] if weights_only else ["model", "optimizer"], config, rules)
        places.append(archive.where)
        kinds.append(logical_tensors(archive, weights_only))
    first_kinds, second_kinds = kinds
    names = {
        kind: [set(one[kind].keys()) if kind in one else set() for one in kinds] for kind in first_kinds | second_kinds
    }
    advance = counted(progress, "comparing", total := sum(len(a & b) for a, b in names.values()))
    found: list[Difference] = []
    for kind, (a, b) in names.items():
        found += [Difference(kind, name, f"only in {'A' if name in a else 'B'}", fatal=True) for name in a ^ b]
        for name in sorted(a & b):
            found += _compare(kind, name, first_kinds[kind], second_kinds[kind])
            advance()
    found.sort(key=lambda one: (not one.fatal, -one.relative, one.kind, one.name))
    has_optimizer = [bool(one.keys() - {"weights"}) for one in kinds]
    return Comparison((places[0], places[1]), total, found, (has_optimizer[0], has_optimizer[1]))


def _plain_weights(path: PathLike) -> WeightSource | None:
    """Return unsharded weights if the path has safetensors and no checkpoint, else None."""
    storage = storage_of(path)
    if not storage.local or holds_checkpoint(storage) or reference_in(storage, None) is not None:
        return None
    there = Path(path)
    return stored_weights(there) if there.is_file() or any(there.glob("*.safetensors")) else None


def logical_tensors(archive: AnyArchive, weights_only: bool = False) -> Kinds:
    """Return all model tensors of a checkpoint and, unless ``weights_only``, all optimizer tensors."""
    found: Kinds = {}
    if any(archive.parts("model")):
        found["weights"] = RunsSource(archive.pieces("model"))
    if weights_only or not any("pieces" in part and part["pieces"] for _, part in archive.parts("optimizer")):
        return found
    pieces = archive.pieces("optimizer")
    state = StoredState(pieces, archive)
    numbers: dict[str, dict[str, Tensor]] = {}
    for piece in pieces:
        for key, value in state.others(piece, anywhere=False):
            numbers.setdefault(key, {}).setdefault(piece.param, value)
    return found | state.sources | {key: DictSource(tensors) for key, tensors in numbers.items()}


def _compare(kind: str, name: str, first: WeightSource, second: WeightSource) -> Iterator[Difference]:
    shapes = first.shape(name), second.shape(name)
    if shapes[0] != shapes[1]:
        yield Difference(kind, name, f"shape {list(shapes[0])} and {list(shapes[1])}", fatal=True)
        return
    a, b = first.read(name), second.read(name)
    problem = "" if a.dtype == b.dtype else f"type {dtype_name(a.dtype)} and {dtype_name(b.dtype)}"
    largest, relative = difference_of(a, b)
    if problem or largest:
        yield Difference(kind, name, problem, largest, relative)


def difference_of(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Return ``(max |a - b|, max |a - b| / max(|a|, |b|))`` in float64; equal infinities and two NaN are equal.

    Integers that differ do so by 1 or more, also where float64 has one number for both.
    """
    if not a.numel() or (a.dtype == b.dtype and a.equal(b)):
        return 0.0, 0.0
    largest, scale = 0.0, 0.0
    whole = a.dtype == b.dtype and not (a.is_floating_point() or a.is_complex())
    for left, right in zip(a.reshape(-1).split(CHUNK), b.reshape(-1).split(CHUNK), strict=True):
        same = (left == right) if whole else None  # before float64 rounds the large ones
        left, right = left.double(), right.double()
        if same is None:
            same = (left == right) | (left.isnan() & right.isnan())
        scale = max(scale, *(float(side.abs().nan_to_num(0.0, 0.0, 0.0).max()) for side in (left, right)))
        if not bool(same.all()):
            gap = (left - right).abs().clamp_min(1.0 if whole else 0.0).masked_fill(same, 0.0)
            largest = max(largest, float(torch.where(gap.isfinite(), gap, torch.inf).max()))
    return largest, (largest / scale if scale else torch.inf) if largest else 0.0
