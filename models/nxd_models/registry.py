"""The registry of model families, and the way from a model directory to a module.

A family is found by the ``model_type`` in ``config.json``. Ours are in :data:`BUILT_IN`; a model type without one that
has a tensor-parallel plan runs in transformers' own module (:data:`LAST_RESORT`); a package adds a family with an entry
point per model type, which is imported only when a directory of that type is read:

    [project.entry-points."nxd_infer.models"]
    gpt2 = "my_package.gpt2:GPT2"        # a ModelSpec

and a program adds its own with :func:`register`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from nxd_infer import hugging_face as hf
from nxd_infer.errors import MissingPackageError, ModelConfigError
from nxd_infer.hugging_face.gguf_file import model_directory
from nxd_infer.hugging_face.quantized.formats import dequantized
from nxd_infer.util.dtypes import dtype_of
from nxd_models.hf import sentence_transformers as sentence
from nxd_models.hf.config_file import ModelFile, read_json
from nxd_models.spec import (
    NATIVE,
    TASKS,
    TRANSFORMERS,
    DecoderConfig,
    EncoderConfig,
    ModelDirectory,
    ModelSpec,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from nxd_infer.layout import WeightSource

__all__ = [
    "TASKS", "build", "find", "load_config", "load_model", "model_types", "parse_config", "register", "weights",
]  # fmt: skip

GROUP = "nxd_infer.models"
BUILT_IN = {
    "llama": "nxd_models.llama.family:LLAMA",
    "mistral": "nxd_models.llama.family:LLAMA",
    "qwen2": "nxd_models.llama.family:LLAMA",
    "qwen3": "nxd_models.llama.family:LLAMA",
    "mixtral": "nxd_models.llama.family:MIXTRAL",
    "qwen3_moe": "nxd_models.llama.family:QWEN3_MOE",
    "gpt_neox": "nxd_models.gpt_neox.family:GPT_NEOX",
    "t5": "nxd_models.t5.family:T5",
    "bert": "nxd_models.bert.family:BERT",
    "roberta": "nxd_models.bert.family:ROBERTA",
}
LAST_RESORT = "nxd_models.generic.family"
"""The module with the families of model types that transformers runs: ``model_types()``, ``family_of(model_type)``."""
_registered: dict[str, ModelSpec] = {}


def register(spec: ModelSpec) -> ModelSpec:
    """Register a family in this process; returns it. Rank processes that trace must make the call too.

    Raises ModelConfigError naming the owner if one of its model types is already registered.
    """
    for model_type in spec.model_types:
        owners = _owners(model_type)
        if owners and _registered.get(model_type) is not spec:
            raise ModelConfigError(f"{spec}: model_type {model_type!r} is registered already, by {owners[0]}")
    _registered.update(dict.fromkeys(spec.model_types, spec))
    return spec


def model_types() -> list[str]:
    """Return every model type that has a family. Imports no family."""
    return list(dict.fromkeys([*BUILT_IN, *_registered, *(point.name for point in _points())]))


def find(model_type: Any, origin: str = "config.json") -> ModelSpec:
    """Return the family of a model type, that of transformers' own module if there is none of ours.

    Raises ModelConfigError if it is unknown (lists the known ones), if two packages claim it (names both), or
    if its package cannot be imported (with the reason).
    """
    owners = _owners(model_type)
    if not owners:
        return _last_resort(model_type, origin)
    if len(owners) > 1:
        raise ModelConfigError(
            f"{origin}: model_type = {model_type!r} is registered more than once: by {' and by '.join(owners)}; "
            "uninstall all but one"
        )
    if model_type in _registered:
        return _registered[model_type]
    if model_type in BUILT_IN:
        module, _, name = BUILT_IN[model_type].partition(":")
        return getattr(importlib.import_module(module), name)
    return _imported(next(point for point in _points() if point.name == model_type), origin)


def _last_resort(model_type: Any, origin: str, embeds: bool = False) -> ModelSpec:
    families = importlib.import_module(LAST_RESORT)
    spec = families.family_of(model_type, embeds)
    if spec is None:
        raise ModelConfigError(
            f"{origin}: model_type = {model_type!r}: this architecture is not defined here; known are "
            f"{', '.join(model_types())}, and whatever the installed transformers defines; a package adds one by an "
            f"entry point of the group {GROUP} (docs/models.md)"
        )
    return spec


def _points() -> list[EntryPoint]:
    return list(entry_points(group=GROUP))


def _owners(model_type: Any) -> list[str]:
    """Describe everyone who has registered a model type."""
    if not isinstance(model_type, str):
        return []
    found = ["nxd_infer itself"] if model_type in BUILT_IN else []
    found += ["a call of register()"] if model_type in _registered else []
    return found + sorted(_words(point) for point in _points() if point.name == model_type)


def _words(point: EntryPoint) -> str:
    return f"the package {point.dist.name if point.dist else '?'} ({point.value})"


def _imported(point: EntryPoint, origin: str) -> ModelSpec:
    try:
        spec = point.load()
    except Exception as error:
        raise ModelConfigError(
            f"{origin}: model_type = {point.name!r} is registered by {_words(point)}, which cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(spec, ModelSpec) or point.name not in spec.model_types:
        what = f"the {spec}" if isinstance(spec, ModelSpec) else f"a {type(spec).__name__}"
        raise ModelConfigError(
            f"{origin}: model_type = {point.name!r} is registered by {_words(point)}, which is {what}: expected a "
            f"ModelSpec with {point.name!r} among its model_types"
        )
    return spec


def parse_config(raw: Mapping[str, Any], origin: str = "config.json") -> DecoderConfig | EncoderConfig:
    """Return the configuration of a known family. Raises ModelConfigError naming the field otherwise."""
    return find(raw.get("model_type"), origin).read_config(dequantized(raw, origin), origin)


def load_config(
    model_dir: str | os.PathLike[str] | ModelDirectory, model_impl: str | None = None, task: str | None = None
) -> ModelDirectory:
    """Read ``config.json``. Raises ModelConfigError naming the field of anything that cannot be run exactly.

    ``model_impl``: "native": for the family of its model type; "transformers": for transformers' own module; "auto" or
    None: for the family, if there is one that covers every field and can do ``task`` (None: what the directory is for),
    else for transformers' module, and ``why`` says what the family lacks.
    """
    if isinstance(model_dir, ModelDirectory):
        return model_dir
    path = model_directory(model_dir)
    file = path / "config.json"
    raw = {**dequantized(read_json(file), str(file)), **sentence.activation_fields(path)}
    architectures, written_to_embed = ModelFile.read(raw, str(file)).architectures, sentence.embeds(path)

    def read(spec: ModelSpec, why: str = "") -> ModelDirectory:
        config = spec.read_config(raw, str(file))
        return ModelDirectory(path, spec, config, architectures, raw, why, written_to_embed)

    kind, embeds = raw.get("model_type"), task == "embed" or (task is None and written_to_embed)
    if model_impl == TRANSFORMERS:
        return read(_last_resort(kind, str(file), embeds))
    spec = find(kind, str(file))
    if model_impl == NATIVE and spec.model_impl is not None:
        raise ModelConfigError(f"{file}: model_type = {kind!r} has no family here (model_impl = {NATIVE!r})")
    if model_impl == NATIVE or spec.model_impl is not None:
        return read(_last_resort(kind, str(file), embeds) if embeds and spec.model_impl else spec)
    try:
        found = read(spec)
        found.task(task)
    except ModelConfigError as error:
        why = str(error)
    else:
        return found
    try:
        return read(_last_resort(kind, str(file), embeds), why)
    except (ModelConfigError, MissingPackageError) as error:
        raise type(error)(f"{why}; in transformers' own module: {error}") from error


def build(
    model: str | os.PathLike[str] | ModelDirectory,
    task: str | None = None,
    dtype: torch.dtype | None = None,
    model_impl: str | None = None,
    **options: Any,
) -> nn.Module:
    """Build the module for ``task``, newly initialized, parallel over the current context. Reads no weights.

    Args:
        model: a model directory, or the result of :func:`load_config`.
        task: "generate": a causal language model; "embed": an encoder with pooling; "classify": one with its head.
        dtype: of the parameters; default: that of the checkpoint.
        model_impl: as of :func:`load_config`.
        options: ``pooling`` and ``normalize`` for "embed"; by default as specified in the directory.
    """

    directory = load_config(model, model_impl, task)
    task = directory.task(task)
    if task == "embed":
        options = {**sentence.pooling_options(directory.path), **options}
    elif options:
        raise ModelConfigError(f"task {task!r} takes no options, got {sorted(options)}")
    return directory.make(task, dtype_of(directory.config.dtype) if dtype is None else dtype, **options)


def weights(model_dir: str | os.PathLike[str] | ModelDirectory, task: str | None = None) -> WeightSource:
    """Open the weights of a model directory for a task; see :mod:`nxd_infer.hugging_face.weights`.

    transformers reads those of a model type without a plan, whole.
    """
    if not isinstance(model_dir, ModelDirectory):
        return hf.weights.weights(model_dir)
    path, task = model_dir.path, model_dir.task(task)
    read = model_dir.spec.tasks[task].weights or hf.weights.weights
    dense = sentence.pooling_options(path).get("dense", ()) if task == "embed" else ()
    if not dense:
        return read(path)
    from nxd_infer.layout.sources import FirstOf, RemappedSource  # imports torch

    layers = [
        RemappedSource(source, {f"dense.{i}.{name.removeprefix('linear.')}": name for name in source.keys()})  # noqa: SIM118
        for i, source in enumerate(hf.weights.weights(path / one["folder"]) for one in dense)
    ]
    return FirstOf(*layers, read(path))


def load_model(
    model_dir: str | os.PathLike[str],
    task: str | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> nn.Module:
    """Call :func:`build`, load this rank's weights, and switch to evaluation mode."""
    import torch  # slow, and not needed for registering

    directory = load_config(model_dir, task=task)
    with torch.device("meta"):
        module = build(directory, task, dtype, **options)
    return hf.weights.load(module, weights(directory, task)).eval()
