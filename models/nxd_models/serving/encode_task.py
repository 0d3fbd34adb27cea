"""The plan of the tasks "embed" and "classify": one graph per batch size and length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nxd_infer.errors import ModelConfigError
from nxd_infer.util.dtypes import dtype_name, dtype_of
from nxd_models.hf import sentence_transformers as sentence
from nxd_models.serving.pooling import pooling_modes
from nxd_models.serving.task_options import TaskOptions
from nxd_models.serving.task_plan import TaskPlan, make_plan
from nxd_models.spec import EncoderConfig, ModelDirectory


def plan_encode(directory: ModelDirectory, task: str, options: TaskOptions) -> TaskPlan:
    """Plan one call of an encoder, for every batch size and length; see :func:`nxd_models.serving.tasks.plan`."""
    config = directory.config
    if not isinstance(config, EncoderConfig):
        raise ModelConfigError(f"{directory.path}: model_type = {config.model_type!r} is not an encoder")
    limit, why = config.max_length, f"max_position_embeddings = {config.max_position} of this {config.model_type} model"
    text = sentence.longest_text(directory.path)
    if text is not None and text < limit:
        limit, why = text, f"max_seq_length = {text}, which sentence-transformers wrote beside the model"
    max_len, batches = options.max_len, sorted(set(options.batch_sizes))
    if max_len is not None and max_len > limit:
        raise ModelConfigError(f"max_len = {max_len} is beyond {why}; use at most {limit}")
    longest = min(max(options.prompt_buckets) if max_len is None else max_len, limit)
    asked = {min(length, longest) for length in options.prompt_buckets}
    lengths = sorted(asked if max_len is None else {*asked, longest})
    shapes = {f"b{b}_s{s}": (b, s) for b in batches for s in lengths}
    dtype = options.dtype or dtype_of(config.dtype)
    module: dict[str, Any] = {}
    if task == "embed":
        module = {"pooling": "mean", "normalize": True, **sentence.pooling_options(directory.path)}
        given = {"pooling": options.pooling, "normalize": options.normalize}
        module |= {name: value for name, value in given.items() if value is not None}
    kwargs = {"model_dir": str(directory.path), "task": task, "dtype": dtype, **module}
    metadata: dict[str, Any] = {
        "task": task,
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "max_len": lengths[-1],
        "batch_sizes": batches,
        "length_buckets": lengths,
        "dtype": dtype_name(dtype),
        "pad_token_id": config.pad_token_id,
    }
    if task == "embed":
        dimensions = config.hidden_size * len(pooling_modes(module["pooling"]))
        metadata |= {"dimensions": dimensions, **module, **sentence.prompts(directory.path)}
    else:
        metadata |= {"labels": list(config.labels), "scores": config.scores}
    buckets = {name: _example(b, s) for name, (b, s) in shapes.items()}
    return make_plan(task, kwargs, buckets, metadata, options.weights)


def _example(batch: int, length: int) -> dict[str, Tensor]:
    return {
        "input_ids": torch.zeros(batch, length, dtype=torch.int64),
        "attention_mask": torch.ones(batch, length, dtype=torch.int64),
        "token_type_ids": torch.zeros(batch, length, dtype=torch.int64),
    }
