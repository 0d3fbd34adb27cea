"""``nxd-infer ckpt``: work on training checkpoints in one process, one tensor at a time.

Each command takes a folder of ``save_checkpoint``, one checkpoint in it, or a folder that the reference wrote. Files
are verified by checksum before use.
"""

from __future__ import annotations

import datetime
import math
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nxd_infer.artifact.manifest import WeightSpec
from nxd_infer.artifact.rank_weights import write_safetensors
from nxd_infer.checkpoint import compare
from nxd_infer.checkpoint.archive import Archive, RunsSource, adapter_of, require_no_adapter
from nxd_infer.checkpoint.compare import Difference
from nxd_infer.checkpoint.folder import Checkpoint, complete_checkpoints, find_checkpoint, holds_checkpoint
from nxd_infer.checkpoint.neuronx.archive import (
    AnyArchive,
    ReferenceArchive,
    one_by_one,
    open_reference,
)
from nxd_infer.checkpoint.neuronx.folder import find_reference
from nxd_infer.checkpoint.neuronx.layouts import infer_layouts, read_rules
from nxd_infer.checkpoint.neuronx.optimum import layouts_of, metadata_files
from nxd_infer.checkpoint.reshard import Resharding
from nxd_infer.checkpoint.storage import LocalStorage, storage_of
from nxd_infer.cli.console import bar, console, slow_bar, table
from nxd_infer.distributed.adapters import adapter_file, adapters_in
from nxd_infer.distributed.parallelizer import SHARDS
from nxd_infer.errors import CheckpointError, ModelConfigError
from nxd_infer.layout import ParamLayout, SafetensorsSource, WeightSource, check_weights, weight_layout
from nxd_infer.layout.files.atomic import replacing
from nxd_infer.util.units import size
from nxd_models import registry
from nxd_models.hf.weights import StoredSource

WEIGHTS = "model.safetensors"
CONFIG, ADAPTER = "config.json", "adapter_model.safetensors"
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
"""Weights, and indexes of weights."""
SHOWN = 24
"""Rows of a table of differences."""


def open_archive(
    path: str | os.PathLike[str],
    tag: str | None,
    kinds: Iterable[str],
    config: Path | None = None,
    rules: Path | None = None,
) -> AnyArchive:
    """Open a checkpoint and verify the files of ``kinds``. ``config`` or ``rules`` give the reference's layouts."""
    theirs = _reference(path, tag)
    if theirs is None:
        archive = Archive(find_checkpoint(storage_of(path), tag))
        archive.verify(kinds)
        return archive
    if tables := metadata_files(Path(theirs.where)):
        theirs.know(layouts_of(theirs, tables))
        return theirs
    known = _layouts(config) if config is not None else {}
    theirs.know({**infer_layouts(theirs, read_rules(rules) if rules else None, known), **known})
    return theirs


def _reference(path: str | os.PathLike[str], tag: str | None) -> ReferenceArchive | None:
    """Return the reference's checkpoint at ``path``, or None if it is ours."""
    storage = storage_of(path)
    ours = holds_checkpoint(storage, tag)
    if ours or not isinstance(storage, LocalStorage) or find_reference(storage.root, tag) is None:
        return None
    return open_reference(storage.root, tag)


def _layouts(config: Path) -> dict[str, ParamLayout]:
    """Return the layouts of the parameters of a Hugging Face directory's model, under each of their names."""
    with torch.device("meta"):
        layouts = weight_layout(registry.build(config))
    return {**one_by_one(layouts), **layouts}


def inspect(path: Path, tag: str | None) -> None:
    """Print the checkpoints of a folder, or with a tag the logical tensors of one."""
    theirs = _reference(path, tag)
    if theirs is not None:
        _inspect_reference(theirs)
        return
    storage = storage_of(path)
    found = find_checkpoint(storage, tag)  # raises with the fix if there is none
    there = [found] if tag is not None or not found.folder else complete_checkpoints(storage)
    table("", ("tag", "number", "saved", "ranks", "degrees", "files", "size"), [_row(one) for one in there])
    if tag is None:
        return
    archive = Archive(there[0])
    for kind in ("model", "optimizer"):
        if not any("pieces" in part for _, part in archive.parts(kind)):
            continue
        source = RunsSource(archive.pieces(kind))
        shapes = {name: source.shape(name) for name in sorted(source.keys())}
        elements = sum(math.prod(shape) for shape in shapes.values())
        title = f"{kind}: {len(shapes)} tensors, {elements:,} elements"
        if kind == "optimizer":
            console.print(f"{title} with state")
            continue
        table(
            title,
            ("name", "shape", "type"),
            [
                (name, str(list(shape)), str(source.dtype(name)).removeprefix("torch."))
                for name, shape in shapes.items()
            ],
        )


def _row(found: Checkpoint) -> tuple[str, ...]:
    saved = datetime.datetime.fromtimestamp(found.manifest["saved_at"]).isoformat(" ", "seconds")
    files = found.manifest["files"]
    world = str(found.manifest["world_size"])
    total = size(sum(files.values()))
    return found.tag, str(found.counter), saved, world, _degrees(found.degrees), str(len(files)), total


def _degrees(degrees: dict[str, int]) -> str:
    return " ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "1"


def _inspect_reference(archive: ReferenceArchive) -> None:
    """Print the tensors of the first tensor-parallel rank: these files contain no more information."""
    console.print(f"{archive.where}: written by neuronx_distributed, degrees {_degrees(archive.degrees)}", markup=False)
    if any(archive.parts("optimizer")):
        console.print("with the state of an optimizer")
    rows = [
        (name, str(list(tensor.shape)), str(tensor.dtype).removeprefix("torch."))
        for ranks in archive.stages()
        for name, tensor in sorted(ranks[0].items())
    ]
    table(f"model: {len(rows)} tensors per tensor-parallel rank", ("name", "shape on a rank", "type"), rows)


def consolidate(
    path: Path,
    out: Path,
    tag: str | None,
    dtype: str | None,
    config: Path | None = None,
    rules: Path | None = None,
) -> Path:
    """Write the model of a checkpoint to ``out/model.safetensors``, completely or not at all; return its path."""
    source = RunsSource(open_archive(path, tag, ["model"], config, rules).pieces("model"))
    beside = path.parent if path.name == SHARDS else path
    if (beside / CONFIG).is_file():  # of a parallelized model of transformers
        return _write_model(source, beside, out, dtype)
    factors, alone = adapter_of(source)
    if factors:
        what = "only an adapter" if alone else "the weights and an unmerged adapter"
        console.print(f"note: these are {what}: {factors[0]}, ...", markup=False)
    return _write(source, out, dtype)


def _write_model(source: WeightSource, beside: Path, out: Path, dtype: str | None) -> Path:
    """Write a directory that transformers loads, and in it ``adapter/NAME`` for each adapter of PEFT."""
    own, adapters = adapters_in(source)
    written = _write(own, out, dtype)
    _copy_files(beside, out)
    for name, weights in adapters.items():
        folder = out / "adapter" / name
        _write(weights, folder, dtype).rename(folder / ADAPTER)
        (out / adapter_file(name)).rename(folder / "adapter_config.json")
    return written


def _copy_files(model_dir: Path, out: Path) -> None:
    """Copy what is beside the weights in a Hugging Face directory: the configuration and the tokenizer."""
    for file in sorted(model_dir.iterdir()):
        if file.is_file() and not file.name.endswith(NOT_COPIED):
            shutil.copyfile(file, out / file.name)


def _write(source: WeightSource, out: Path, dtype: str | None) -> Path:
    if (out / WEIGHTS).exists():
        raise CheckpointError(f"{out / WEIGHTS} already exists; remove it or choose another directory")
    wanted = getattr(torch, dtype) if dtype else None

    def stored(name: str) -> torch.dtype:
        own = source.dtype(name)
        return wanted if wanted is not None and own.is_floating_point else own

    specs = [
        WeightSpec.of(name, torch.empty(source.shape(name), dtype=stored(name), device="meta"))
        for name in source.keys()  # noqa: SIM118  (a source is not a mapping)
    ]
    out.mkdir(parents=True, exist_ok=True)
    with bar() as progress:
        task = progress.add_task(f"writing {out / WEIGHTS}", total=len(specs), note="")

        def tensor(spec: WeightSpec) -> Tensor:
            progress.advance(task)
            return source.read(spec.name).to(spec.torch_dtype)

        with replacing(out / WEIGHTS) as temporary, open(temporary, "wb") as file:
            write_safetensors(file, specs, tensor, {"format": "pt"})
    return out / WEIGHTS


def reshard(
    path: Path,
    out: Path,
    tp: int,
    dp: int | None,
    tag: str | None,
    config: Path | None = None,
    rules: Path | None = None,
    pp: int = 1,
    cuts: Sequence[str] | None = None,
) -> None:
    """Write a checkpoint into the folder ``out`` as a job of other degrees would have saved it."""
    archive = open_archive(path, tag, ["model", "optimizer", "values"], config, rules)
    target = storage_of(out)
    taken = (Path(path).resolve(), Path(archive.where).resolve())
    if isinstance(target, LocalStorage) and target.root.resolve() in taken:
        raise CheckpointError(f"{out} is the folder of the checkpoint itself; write to another one")
    work = Resharding(archive, tp, dp, pp, cuts)
    name = archive.checkpoint.tag if isinstance(archive, Archive) else Path(archive.where).name
    with slow_bar(f"writing {target.where()}", work.steps) as advance:
        work.write(target, name, advance)
    for note in work.notes:
        console.print(f"note: {note}", markup=False)
    console.print(
        f"{target.where(name)}: {work.steps} tensors for {len(work.contexts)} rank(s), tp {work.tp} "
        f"{f'pp {work.pp} ' if work.pp > 1 else ''}dp {work.dp} "
        f"(was {_degrees(archive.degrees)})",
        markup=False,
    )


def diff(
    first: Path,
    second: Path,
    tolerance: float,
    weights_only: bool,
    config: Path | None = None,
    rules: Path | None = None,
    tags: tuple[str | None, str | None] = (None, None),
) -> int:
    """Compare two checkpoints; the exit status: 1 when they differ by more than ``tolerance``."""
    kinds = []
    for side, path, tag in zip("AB", (first, second), tags, strict=True):
        weights = None if tag else _plain_weights(path)
        if weights is not None:
            console.print(f"{side}: {path}", markup=False, soft_wrap=True)
            kinds.append({"weights": weights})
            continue
        archive = open_archive(path, tag, ["model"] if weights_only else ["model", "optimizer"], config, rules)
        console.print(f"{side}: {archive.where}", markup=False, soft_wrap=True)
        kinds.append(compare.logical_tensors(archive, weights_only))
    total = compare.count(*kinds)
    with slow_bar("comparing", total) as advance:
        found = list(compare.differences(kinds[0], kinds[1], advance))
    found.sort(key=lambda one: (not one.fatal, -one.relative, one.kind, one.name))
    beyond = [one for one in found if one.fatal or one.relative > tolerance or (one.problem and not tolerance)]
    if found:
        rows = [(one.name, one.kind, one.problem, *_numbers(one)) for one in found[:SHOWN]]
        table("", ("tensor", "of", "what", "max |a-b|", "relative"), rows)
    if len(found) > SHOWN:
        console.print(f"... and {len(found) - SHOWN} more")
    console.print(
        f"{total} tensors compared, {len(found)} differ, {len(beyond)} by more than the tolerance of {tolerance:g}"
    )
    states = [bool(one.keys() - {"weights"}) for one in kinds]
    if states[0] != states[1]:
        console.print(f"only {'A' if states[0] else 'B'} has optimizer state: pass --weights-only to ignore it")
    return int(bool(beyond))


def _plain_weights(path: Path) -> WeightSource | None:
    """Return unsharded weights if the path has safetensors and no checkpoint, else None."""
    storage = storage_of(path)
    if not storage.local or holds_checkpoint(storage) or _reference(path, None) is not None:
        return None
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    return SafetensorsSource(path) if files else None


def _numbers(one: Difference) -> tuple[str, str]:
    return ("", "") if one.fatal else (f"{one.largest:.3g}", f"{one.relative:.3g}")


def export_hf(
    path: Path, out: Path, config: Path, tag: str | None, dtype: str | None, rules: Path | None = None
) -> None:
    """:func:`consolidate` the whole model, and add the configuration and the tokenizer of ``config``."""
    if not (config / CONFIG).is_file():
        raise ModelConfigError(f"{config} has no {CONFIG}: pass the directory of the model that was trained")
    if out.exists() and out.samefile(config):
        raise CheckpointError(f"{out} is the directory of the configuration itself; write to another one")
    archive = open_archive(path, tag, ["model"], config, rules)
    source = RunsSource(archive.pieces("model"))
    require_no_adapter(source, archive.where)
    _write(_as_stored(source, config), out, dtype)
    _copy_files(config, out)


def _as_stored(source: WeightSource, config: Path) -> WeightSource:
    """Return ``source`` as checkpoints of the model of ``config`` are stored; of an unknown model as it is.

    Raises WeightMismatchError if a weight of the model is missing.
    """
    try:
        with torch.device("meta"):
            module = registry.build(config)
    except ModelConfigError as error:
        console.print(f"note: the weights were not compared with {config / CONFIG}: {error}", markup=False)
        return source
    check_weights(weight_layout(module), source, strict=False)  # like transformers, ignore the heads of other tasks
    return StoredSource(source, getattr(module, "nxd_stored", {}))
