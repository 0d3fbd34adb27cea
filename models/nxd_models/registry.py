"""From a model directory to a module: which family it is, what it can do, and how to build it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nxd_infer.errors import ModelConfigError
from nxd_models.hf.config import DecoderConfig, EncoderConfig, Fields, parse_config, read_json
from nxd_models.hf.weights import HuggingFaceSource, load
from nxd_models.hf.weights import weights as _weights

TASKS = ("generate", "embed", "classify")
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class ModelSpec:
    """A model directory, read and understood."""

    path: Path
    config: DecoderConfig | EncoderConfig
    architectures: tuple[str, ...]
    raw: Mapping[str, Any]
    """``config.json`` as it stands."""

    @property
    def model_type(self) -> str:
        return self.config.model_type

    @property
    def tasks(self) -> tuple[str, ...]:
        """What this model can do, the default first."""
        if isinstance(self.config, DecoderConfig):
            return ("generate",)
        if any(name.endswith("ForSequenceClassification") for name in self.architectures):
            return ("classify", "embed")
        return ("embed",)

    def task(self, wanted: str | None) -> str:
        """``wanted``, or the default. Raises ModelConfigError naming ``architectures`` when the model cannot do it."""
        if wanted is None:
            return self.tasks[0]
        if wanted not in TASKS:
            raise ModelConfigError(f"there is no task {wanted!r}; tasks are {', '.join(TASKS)}")
        if wanted not in self.tasks:
            raise ModelConfigError(
                f"{self.path}: a {self.model_type} model with architectures = {list(self.architectures)} cannot do "
                f"{wanted!r}; it can do {', '.join(self.tasks)}"
            )
        return wanted


def load_config(model_dir: str | os.PathLike[str] | ModelSpec) -> ModelSpec:
    """Read ``config.json``. Raises ModelConfigError naming the field of anything that cannot be run exactly."""
    if isinstance(model_dir, ModelSpec):
        return model_dir
    path = Path(model_dir)
    file = path / "config.json"
    raw = read_json(file)
    return ModelSpec(path, parse_config(raw, str(file)), Fields(raw, str(file)).texts("architectures"), raw)


def build(
    model: str | os.PathLike[str] | ModelSpec,
    task: str | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> nn.Module:
    """The module for ``task``, with fresh weights, parallel over the current context. No weights are read.

    Args:
        model: a model directory, or what :func:`load_config` made of it.
        task: "generate" gives a CausalLM; "embed" an encoder with pooling; "classify" one with its head.
        dtype: of the parameters; default: what the checkpoint says.
        options: ``pooling`` and ``normalize`` for "embed".
    """
    from nxd_models.bert import model as bert
    from nxd_models.hf import sentence_transformers as sentence
    from nxd_models.llama import model as llama

    spec = load_config(model)
    task = spec.task(task)
    config = spec.config
    dtype = DTYPES[config.dtype] if dtype is None else dtype
    if isinstance(config, DecoderConfig):
        if options:
            raise ModelConfigError(f"task {task!r} takes no options, got {sorted(options)}")
        return llama.CausalLM(config, dtype)
    if task == "embed":
        return bert.SentenceEncoder(config, dtype, **{**sentence.pooling_options(spec.path), **options})
    return bert.classifier(config, dtype)


def weights(model_dir: str | os.PathLike[str]) -> HuggingFaceSource:
    """The weights of a model directory, streamed by slices; see :mod:`nxd_models.hf.weights`."""
    return _weights(model_dir)


def load_model(
    model_dir: str | os.PathLike[str],
    task: str | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> nn.Module:
    """:func:`build` with this rank's weights read into it, in evaluation mode."""
    spec = load_config(model_dir)
    with torch.device("meta"):
        module = build(spec, task, dtype, **options)
    return load(module, weights(spec.path)).eval()
