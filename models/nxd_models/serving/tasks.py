"""What ``parallel_model_trace`` needs to trace a model directory for a task: buckets, example inputs, metadata, files.

    plan = tasks.plan("model_dir", batch_sizes=[1, 4], length_buckets=[128, 512], max_len=1024)
    model = parallel_model_trace(**plan.trace_arguments(), tp_degree=2)

Buckets of a decoder: ``decode_b<B>`` (B rows of one token) for every batch size, ``verify_b<B>`` (B rows of a token and
``speculate`` guesses) beside it where that is asked for, ``prefill_s<S>`` (one row of S tokens) for every prompt
length, and ``mixed_b<B>`` (as ``decode``, with a row for every slot and PROMPT_ROWS for tokens of prompts). Buckets of
an encoder: ``b<B>_s<S>`` for every pair.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from nxd_infer.errors import ModelConfigError
from nxd_infer.layout.sources import Weights
from nxd_models import registry
from nxd_models.hf import sentence_transformers as sentence
from nxd_models.serving.adapter_slots import RANK as LORA_RANK
from nxd_models.serving.adapter_slots import AdapterSlots
from nxd_models.serving.decoder_step import BIAS_SLOTS, MAX_DRAFT_TOKENS
from nxd_models.serving.encode_task import plan_encode
from nxd_models.serving.generate_task import plan_generate
from nxd_models.serving.task_plan import TaskPlan

BATCH_SIZES = (1, 4)
LENGTH_BUCKETS = (128,)
SERVING_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
)
"""What a server needs beside the graphs; copied where present, with the files of sentence-transformers."""

FURTHER_TEMPLATES = "additional_chat_templates"
"""The folder of chat templates for other uses, copied too."""


def plan(
    model_dir: str | os.PathLike[str],
    task: str | None = None,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    length_buckets: Sequence[int] = LENGTH_BUCKETS,
    max_len: int | None = None,
    dtype: torch.dtype | None = None,
    slots: int | None = None,
    model_name: str | None = None,
    bias_slots: int = BIAS_SLOTS,
    pooling: str | None = None,
    normalize: bool | None = None,
    weights: Weights | None = None,
    lora_slots: int = 0,
    lora_rank: int = LORA_RANK,
    lora_targets: Sequence[str] | None = None,
    speculate: int = 0,
) -> TaskPlan:
    """The plan for ``task`` (None: what the model is for).

    Args:
        batch_sizes: rows of the decode buckets, or of the encoder's.
        length_buckets: prompt lengths of a decoder, or sequence lengths of an encoder.
        max_len: the longest context; None is what the model allows, for a decoder at most 4096, for an encoder what
            sentence-transformers wrote beside it. Length buckets beyond it are cut to it.
        dtype: of weights and caches; None is what the checkpoint says.
        slots: sequences a decoder holds at once; None is the largest batch size.
        model_name: what a server calls the model; None is the directory's name.
        bias_slots: tokens a request may bias.
        pooling, normalize: of an embedding model; None is what its directory says, else mean and True.
        weights: in place of the directory's, which then needs none: tensors by name, a WeightSource, or the path of
            safetensors.
        lora_slots: LoRA adapters that a decoder holds at once, each row of a batch using one of them or none.
        lora_rank: the largest rank of an adapter.
        lora_targets: the layers that adapters may change, as ``q_proj``; None is every linear layer of the blocks.
        speculate: guesses that a step of a decoder can verify at most, for a server that speculates; 0 is none.

    Raises ModelConfigError naming the argument or the field of ``config.json``.
    """
    directory = registry.load_config(model_dir)
    task = directory.task(task)
    batches = _sizes("batch_sizes", batch_sizes)
    lengths = _sizes("length_buckets", length_buckets)
    dtype = getattr(torch, directory.config.dtype) if dtype is None else dtype
    assert dtype is not None
    if isinstance(lora_slots, bool) or not isinstance(lora_slots, int) or lora_slots < 0:
        raise ModelConfigError(f"lora_slots = {lora_slots!r}: expected a whole number; 0 is none")
    if isinstance(speculate, bool) or not isinstance(speculate, int) or not 0 <= speculate <= MAX_DRAFT_TOKENS:
        raise ModelConfigError(
            f"speculate = {speculate!r}: expected a whole number from 0 (none) to {MAX_DRAFT_TOKENS}"
        )
    if task == "generate":
        lora = AdapterSlots.of(lora_slots, lora_rank, lora_targets or directory.spec.adapter_targets)
        made = plan_generate(directory, batches, lengths, max_len, dtype, slots, bias_slots, lora, speculate, weights)
    elif speculate:
        raise ModelConfigError(f"speculate = {speculate}: the task {task!r} guesses no tokens, generate does")
    elif lora_slots:
        raise ModelConfigError(f"lora_slots = {lora_slots}: the task {task!r} has no slots for adapters, generate has")
    else:
        options: dict[str, Any] = {}
        if task == "embed":
            options = {"pooling": "mean", "normalize": True, **sentence.pooling_options(directory.path)}
            options |= {k: v for k, v in (("pooling", pooling), ("normalize", normalize)) if v is not None}
        made = plan_encode(directory, task, batches, lengths, max_len, dtype, options, weights)
    path = directory.path
    made.metadata["model_name"] = model_name or path.resolve().name
    templates = sorted(f"{FURTHER_TEMPLATES}/{file.name}" for file in path.glob(f"{FURTHER_TEMPLATES}/*.jinja"))
    names = [*SERVING_FILES, *templates, *([] if task == "generate" else sentence.files(path))]
    made.files_to_copy = {name: path / name for name in names if (path / name).is_file()}
    return made


def _sizes(name: str, values: Sequence[int]) -> list[int]:
    found = sorted(set(values))
    if not found or any(isinstance(v, bool) or not isinstance(v, int) or v < 1 for v in found):
        raise ModelConfigError(f"{name} = {list(values)!r}: expected at least one whole number of at least 1")
    return found
