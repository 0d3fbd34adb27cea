"""Write the model of a checkpoint as one safetensors file, or as a Hugging Face directory: one tensor in memory at a
time, completely or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nxd_infer.checkpoint.archive import Archive, adapter_of, require_no_adapter
from nxd_infer.checkpoint.folder import SHARDS
from nxd_infer.checkpoint.open import PathLike, build_on_meta, open_archive
from nxd_infer.checkpoint.peft_adapters import adapter_file, adapters_in
from nxd_infer.errors import CheckpointError, ModelConfigError
from nxd_infer.hugging_face.gguf_file import model_directory
from nxd_infer.hugging_face.quantized.formats import dequantized, format_in
from nxd_infer.hugging_face.weights import StoredSource
from nxd_infer.layout import WeightSource, check_weights, weight_layout
from nxd_infer.layout.files.atomic import replacing
from nxd_infer.layout.files.stream import write_safetensors
from nxd_infer.layout.merge import RunsSource
from nxd_infer.util.progress import Progress, counted, silent

WEIGHTS, CONFIG = "model.safetensors", "config.json"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
"""Weights, and indexes of weights."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    weights: Path
    notes: tuple[str, ...] = ()
    """What the files are not, although a reader may expect it; a sentence each."""


def consolidate_checkpoint(
    path: PathLike,
    out: PathLike,
    *,
    tag: str | None = None,
    dtype: torch.dtype | None = None,
    config: PathLike | None = None,
    rules: PathLike | None = None,
    progress: Progress = silent,
) -> Exported:
    """Write the whole model of a checkpoint of any degrees to ``out/model.safetensors``.

    Beside the shards of a parallelized model of transformers is its configuration: then ``out`` is a directory that
    transformers loads, with ``adapter/NAME`` for each adapter of PEFT.

    Args:
        path, tag, config, rules: the checkpoint; see :func:`~nxd_infer.checkpoint.open.open_archive`.
        out: a directory, which is made; raises CheckpointError if it already has ``model.safetensors``.
        dtype: of floating-point weights. Default: as saved.
        progress: called as ``progress(stage, done, total)``, a step for each tensor.
    """
    archive = open_archive(path, tag, ["model"], config, rules)
    source = RunsSource(archive.pieces("model"))
    folder, out = Path(path), Path(out)
    beside = folder.parent if folder.name == SHARDS else folder
    if (beside / CONFIG).is_file():
        ours = isinstance(archive, Archive) and archive.adapter_files()  # of a LoRAModel, whose names are not PEFT's
        own, adapters = (source, {}) if ours else adapters_in(source)
        for name in adapters:
            if not (beside / adapter_file(name)).is_file():
                raise CheckpointError(
                    f"{beside} lacks {adapter_file(name)}, the configuration of an adapter that the checkpoint holds; "
                    "copy the adapter_config.json of PEFT there under that name"
                )
        format_in(beside)  # which refuses, before anything is written
        written = _write(own, out, dtype, progress)
        _copy_files(beside, out, [adapter_file(name) for name in adapters])
        for name, weights in adapters.items():
            own_folder = out / "adapter" / name
            _write(weights, own_folder, dtype, progress).rename(own_folder / ADAPTER)
            shutil.copyfile(beside / adapter_file(name), own_folder / ADAPTER_CONFIG)
        return Exported(written, _notes(own))
    return Exported(_write(source, out, dtype, progress), _notes(source))


def _notes(source: WeightSource) -> tuple[str, ...]:
    factors, alone = adapter_of(source)
    what = "only an adapter" if alone else "the weights and an unmerged adapter"
    return (f"these are {what}: {factors[0]}, ...",) if factors else ()


def export_hugging_face(
    path: PathLike,
    out: PathLike,
    config: PathLike,
    *,
    tag: str | None = None,
    dtype: torch.dtype | None = None,
    rules: PathLike | None = None,
    progress: Progress = silent,
) -> Exported:
    """Write a Hugging Face directory: the weights of a checkpoint, and the configuration and tokenizer of ``config``.

    Args:
        config: the directory of the model that was trained.
        path, out, tag, dtype, rules, progress: as for :func:`consolidate_checkpoint`.

    Raises CheckpointError if the checkpoint holds an unmerged adapter, WeightMismatchError if a weight of the model is
    missing, ModelConfigError if ``config`` is not a model's directory.
    """
    out, config = Path(out), model_directory(config)
    if not (config / CONFIG).is_file():
        raise ModelConfigError(f"{config} has no {CONFIG}: pass the directory of the model that was trained")
    if out.exists() and out.samefile(config):
        raise CheckpointError(f"{out} is the directory of the configuration itself; write to another one")
    format_in(config)  # which refuses, before anything is written
    archive = open_archive(path, tag, ["model"], config, rules)
    source: WeightSource = RunsSource(archive.pieces("model"))
    require_no_adapter(source, archive.where)
    notes: tuple[str, ...] = ()
    try:
        module = build_on_meta(config)
    except ModelConfigError as error:
        notes = (f"the weights were not compared with {config / CONFIG}: {error}",)
    else:
        check_weights(weight_layout(module), source, strict=False)  # like transformers, ignore other tasks' heads
        source = StoredSource(source, getattr(module, "nxd_stored", {}))
    written = _write(source, out, dtype, progress)
    _copy_files(config, out)
    return Exported(written, notes)


def _copy_files(model_dir: Path, out: Path, without: Sequence[str] = ()) -> None:
    """Copy what is beside the weights in a Hugging Face directory: the configuration and the tokenizer."""
    for file in [] if out.samefile(model_dir) else sorted(model_dir.iterdir()):
        if file.is_file() and not file.name.endswith(NOT_COPIED) and file.name not in without:
            shutil.copyfile(file, out / file.name)
    file = out / CONFIG
    if format_in(out) is not None:  # what is written is plain
        with replacing(file) as temporary:
            temporary.write_text(json.dumps(dequantized(json.loads(file.read_bytes()), str(file)), indent=1))


def _write(source: WeightSource, out: Path, dtype: torch.dtype | None, progress: Progress) -> Path:
    """Write ``out/model.safetensors``; return its path."""
    target = out / WEIGHTS
    if target.exists():
        raise CheckpointError(f"{target} already exists; remove it or choose another directory")

    def stored(name: str) -> torch.dtype:
        own = source.dtype(name)
        return dtype if dtype is not None and own.is_floating_point else own

    entries = [(name, stored(name), source.shape(name)) for name in source.keys()]  # noqa: SIM118  (not a mapping)
    out.mkdir(parents=True, exist_ok=True)
    advance = counted(progress, f"writing {target}", len(entries))

    def tensor(name: str) -> Tensor:
        advance()
        return source.read(name).to(stored(name))

    with replacing(target) as temporary, open(temporary, "wb") as file:
        write_safetensors(file, entries, tensor, {"format": "pt"})
    return target
