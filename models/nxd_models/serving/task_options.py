"""The options of a task's plan, each declared once: name, type, default, limits and what it does.

The signature of ``tasks.plan`` and options of ``nxd-infer trace`` are made of :class:`TaskOptions`. This module is
imported for a command's help, so it imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nxd_infer.errors import ModelConfigError
from nxd_infer.util.options import check_each, option
from nxd_models.spec import NATIVE, TASKS, TRANSFORMERS

if TYPE_CHECKING:
    import torch

    from nxd_infer.layout.sources import Weights

BIAS_SLOTS = 300
"""Biased tokens a row may have; the OpenAI API allows this many."""
MAX_DRAFT_TOKENS = 15
"""Of a step that verifies drafts: attention gives up to 16 queries the bits of decode (``nxd_infer.ops.attention``)."""
LONGEST_BY_DEFAULT = 4096
LARGEST = 2**20
"""Rows or tokens of a bucket."""


@dataclass(eq=False)
class TaskOptions:
    """The arguments of ``tasks.plan``. Raises ModelConfigError for a value that is out of range by itself."""

    model_dir: str | os.PathLike[str] = option(
        ..., "A Hugging Face model directory (config.json, *.safetensors), or a GGUF file."
    )
    task: str | None = option(
        None,
        "What to trace it for. Default: what the directory is for, by its architecture and by modules.json.",
        flag="--task",
        choices=TASKS,
    )
    _: KW_ONLY
    batch_sizes: Sequence[int] = option(
        (1, 4),
        "Batch sizes to compile: rows of a decode bucket, or of an encoder's.",
        flag="--batch-sizes",
        kind=list[int],
        minimum=1,
        maximum=LARGEST,
    )
    prompt_buckets: Sequence[int] = option(
        (32, 128, 512),
        "Prompt lengths to compile, or an encoder's text lengths.",
        details="Those beyond `max_len` are cut to it.",
        flag="--prompt-buckets",
        kind=list[int],
        minimum=1,
        maximum=LARGEST,
    )
    max_len: int | None = option(
        None,
        f"Longest prompt plus answer, in tokens; of an encoder, longest text. Default: {LONGEST_BY_DEFAULT}, or the "
        "model's own if less; of an encoder the longest of `prompt_buckets`.",
        details="An encoder takes at most what sentence-transformers wrote beside it.",
        flag="--max-len",
        kind=int,
        minimum=2,
    )
    dtype: torch.dtype | None = option(
        None,
        "Dtype of the weights and of the arithmetic. Default: from Python the checkpoint's; of the command bfloat16, "
        "which halves float32's bytes per token.",
        flag="--dtype",
        choices=("float32", "bfloat16"),
    )
    model_impl: str | None = option(
        None,
        "native: our family of the model type; transformers: its own module; auto: ours if it covers every field of "
        "config.json, else transformers'. Default: auto.",
        details="[transformers' module](transformers.md#tracing-and-serving) needs the extra `hf`.",
        flag="--model-impl",
        choices=("auto", NATIVE, TRANSFORMERS),
    )
    slots: int | None = option(
        None, "Sequences that a decoder holds at once. Default: the largest batch size.", kind=int, minimum=1
    )
    model_name: str | None = option(None, "What a server calls the model. Default: the directory's name.")
    kv_cache_dtype: str = option(
        "auto",
        "Dtype of keys and values in a decoder's cache: int8 with a scale per position and head, or that of the "
        "arithmetic.",
        flag="--kv-cache-dtype",
        choices=("auto", "int8"),
    )
    bias_slots: int = option(BIAS_SLOTS, "Tokens that a request may bias.", kind=int, minimum=0)
    pooling: str | None = option(None, "Of an embedding model. Default: what its directory says, else mean.")
    normalize: bool | None = option(None, "Of an embedding model. Default: what its directory says, else True.")
    chat_template: str | None = option(
        None,
        "A file with the chat template to use, or the name of one of the model's. Default: the model's default.",
        flag="--chat-template",
        kind=str,
    )
    weights: Weights | None = option(
        None,
        "In place of the directory's, which then needs none: tensors by name, a WeightSource, or the path of "
        "safetensors.",
    )
    lora_slots: int = option(
        0,
        "Number of LoRA adapters that fit at once; the server loads them at run time.",
        details="Each row of a batch uses one of them or none.",
        flag="--lora-slots",
        kind=int,
        minimum=0,
    )
    lora_rank: int = option(16, "Largest rank of an adapter.", flag="--lora-rank", kind=int, minimum=1)
    lora_targets: Sequence[str] | None = option(
        None,
        "Layers that adapters may change, such as q_proj,v_proj. Default: all linear layers.",
        flag="--lora-targets",
        kind=list[str],
    )
    speculate: int = option(
        0,
        "Tokens that `serve --speculate` may guess: one more graph per batch size.",
        flag="--speculate",
        kind=int,
        minimum=0,
        maximum=MAX_DRAFT_TOKENS,
    )

    hidden_states: str | None = option(
        None,
        "Hidden states that a decoder's graphs give for a head, which guesses from them (`serve --draft`).",
        flag="--hidden-states",
        choices=("eagle", "eagle3"),
    )
    head_of: str | os.PathLike[str] | None = option(
        None,
        "`model_dir` is an EAGLE head: the directory of the model that it guesses for.",
        flag="--head-of",
        kind=Path,
    )

    def __post_init__(self) -> None:
        check_each(self, ModelConfigError)
