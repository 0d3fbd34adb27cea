"""``nxd-infer ckpt``: training checkpoints without processes, one tensor at a time."""

from __future__ import annotations

import datetime
import math
import shutil
from pathlib import Path

import torch
from torch import Tensor

from nxd_infer.cli.console import bar, console, size, table
from nxd_infer.errors import CheckpointError, ModelConfigError
from nxd_infer.parallel_layers.checkpoint_files import replacing
from nxd_infer.trace.manifest import WeightSpec
from nxd_infer.trace.weights import write_safetensors
from nxd_infer.trainer.checkpoint_folder import Checkpoint, complete_checkpoints, find_checkpoint
from nxd_infer.trainer.checkpoint_read import Archive, RunsSource

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
"""Weights, and indexes of weights."""


def inspect(path: Path, tag: str | None) -> None:
    """Print the checkpoints of a folder; with a tag its logical tensors."""
    there = complete_checkpoints(path) if tag is None else [find_checkpoint(path, tag)]
    if not there:
        find_checkpoint(path, None)  # raises, and says what to do
    table("", ("tag", "number", "saved", "ranks", "degrees", "files", "size"), [_row(found) for found in there])
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
    degrees = " ".join(f"{axis} {degree}" for axis, degree in found.degrees.items() if degree > 1) or "1"
    files = found.manifest["files"]
    world = str(found.manifest["world_size"])
    return found.tag, str(found.counter), saved, world, degrees, str(len(files)), size(sum(files.values()))


def consolidate(path: Path, out: Path, tag: str | None, dtype: str | None) -> Path:
    """Write the model of a checkpoint to ``out/model.safetensors``, whole or not at all; returns the file."""
    source = RunsSource(Archive(find_checkpoint(path, tag)).pieces("model"))
    wanted = getattr(torch, dtype) if dtype else None

    def stored(name: str) -> torch.dtype:
        own = source.dtype(name)
        return wanted if wanted is not None and own.is_floating_point else own

    specs = [
        WeightSpec.of(name, torch.empty(source.shape(name), dtype=stored(name), device="meta"))
        for name in source.keys()  # noqa: SIM118  (a source is no mapping)
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


def export_hf(path: Path, out: Path, config: Path, tag: str | None, dtype: str | None) -> None:
    """:func:`consolidate` beside the configuration and the tokenizer of ``config``."""
    if not (config / CONFIG).is_file():
        raise ModelConfigError(f"{config} has no {CONFIG}: give the directory of the model that was trained")
    if out.exists() and out.samefile(config):
        raise CheckpointError(f"{out} is the directory of the configuration itself; write to another one")
    consolidate(path, out, tag, dtype)
    for file in sorted(config.iterdir()):
        if file.is_file() and not file.name.endswith(NOT_COPIED):
            shutil.copyfile(file, out / file.name)
