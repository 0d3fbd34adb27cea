"""``nxd-infer ckpt``: print what :mod:`nxd_infer.checkpoint` finds in stored checkpoints, and makes of them."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nxd_infer.checkpoint.archive import Archive
from nxd_infer.checkpoint.compare import compare_checkpoints
from nxd_infer.checkpoint.export import Exported, consolidate_checkpoint, export_hugging_face
from nxd_infer.checkpoint.folder import complete_checkpoints, find_checkpoint
from nxd_infer.checkpoint.neuronx.archive import ReferenceArchive
from nxd_infer.checkpoint.open import open_if_reference
from nxd_infer.checkpoint.reshard import reshard_checkpoint
from nxd_infer.checkpoint.storage import storage_of
from nxd_infer.cli.console import console, slow_bar, table
from nxd_infer.layout.merge import RunsSource
from nxd_infer.util.dtypes import dtype_name
from nxd_infer.util.units import size

SHOWN = 24
"""Rows of a table of differences."""


def inspect(path: Path, tag: str | None) -> None:
    """Print the checkpoints of a folder, or with a tag the logical tensors of one."""
    reference = open_if_reference(path, tag)
    if reference is not None:
        _inspect_reference(reference)
        return
    storage = storage_of(path)
    checkpoint = find_checkpoint(storage, tag)  # raises with the fix if there is none
    listed = [checkpoint] if tag is not None or not checkpoint.folder else complete_checkpoints(storage)
    rows = []
    for one in listed:
        saved = datetime.datetime.fromtimestamp(one.manifest.saved_at).isoformat(" ", "seconds")
        files, world = one.manifest.files, str(one.manifest.world_size)
        total = size(sum(files.values()))
        rows.append((one.tag, str(one.counter), saved, world, _degrees(one.degrees), str(len(files)), total))
    table("", ("tag", "number", "saved", "ranks", "degrees", "files", "size"), rows)
    if tag is None:
        return
    archive = Archive(listed[0])
    for kind in ("model", "optimizer"):
        if not any("pieces" in part for _, part in archive.parts(kind)):
            continue
        source = RunsSource(archive.pieces(kind))
        shapes = {name: source.shape(name) for name in sorted(source.keys())}
        elements = sum(math.prod(shape) for shape in shapes.values())
        title = f"{kind}: {len(shapes)} tensors, {elements:,} elements"
        if kind == "model":
            rows = [(name, str(list(shape)), dtype_name(source.dtype(name))) for name, shape in shapes.items()]
            table(title, ("name", "shape", "type"), rows)
        else:
            console.print(f"{title} with state")


def _degrees(degrees: dict[str, int]) -> str:
    return " ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "1"


def _inspect_reference(archive: ReferenceArchive) -> None:
    """Print the tensors of the first tensor-parallel rank: these files contain no more information."""
    console.print(f"{archive.where}: written by neuronx_distributed, degrees {_degrees(archive.degrees)}", markup=False)
    if any(archive.parts("optimizer")):
        console.print("with the state of an optimizer")
    rows = [
        (name, str(list(tensor.shape)), dtype_name(tensor.dtype))
        for ranks in archive.stages()
        for name, tensor in sorted(ranks[0].items())
    ]
    table(f"model: {len(rows)} tensors per tensor-parallel rank", ("name", "shape on a rank", "type"), rows)


def _told(export: Callable[..., Exported]) -> Callable[..., None]:
    """Return ``export`` with a bar, and printing what was written."""

    def run(*arguments: Any, **options: Any) -> None:
        with slow_bar() as progress:
            done = export(*arguments, progress=progress, **options)
        console.print(f"wrote {done.weights}, {size(done.weights.stat().st_size)}", markup=False, soft_wrap=True)
        _print_notes(done.notes)

    return run


consolidate, export_hf = _told(consolidate_checkpoint), _told(export_hugging_face)


def reshard(path: Path, out: Path, **options: Any) -> None:
    """Call :func:`reshard_checkpoint`; print what was written."""
    with slow_bar() as progress:
        done = reshard_checkpoint(path, out, progress=progress, **options)
    _print_notes(done.notes)
    ranks = math.prod(done.degrees.values())
    now = " ".join(f"{axis} {degree}" for axis, degree in done.degrees.items() if axis != "pp" or degree > 1)
    console.print(
        f"{done.where}: {done.tensors} tensors for {ranks} rank(s), {now} (was {_degrees(done.before)})", markup=False
    )


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        console.print(f"note: {note}", markup=False)


def diff(first: Path, second: Path, tolerance: float, **options: Any) -> int:
    """Print how two checkpoints differ; return the exit status: 1 if by more than ``tolerance``."""
    with slow_bar() as progress:
        result = compare_checkpoints(first, second, progress=progress, **options)
    for side, place in zip("AB", result.places, strict=True):
        console.print(f"{side}: {place}", markup=False, soft_wrap=True)
    different = result.differences
    if different:
        rows = [
            (
                one.name,
                one.kind,
                one.problem,
                *(("", "") if one.fatal else (f"{one.largest:.3g}", f"{one.relative:.3g}")),
            )
            for one in different[:SHOWN]
        ]
        table("", ("tensor", "of", "what", "max |a-b|", "relative"), rows)
    if len(different) > SHOWN:
        console.print(f"... and {len(different) - SHOWN} more")
    beyond = sum(one.exceeds(tolerance) for one in different)
    console.print(
        f"{result.total} tensors compared, {len(different)} differ, "
        f"{beyond} by more than the tolerance of {tolerance:g}"
    )
    if result.optimizers[0] != result.optimizers[1]:
        console.print(
            f"only {'A' if result.optimizers[0] else 'B'} has optimizer state: pass --weights-only to ignore it"
        )
    return int(bool(beyond))
