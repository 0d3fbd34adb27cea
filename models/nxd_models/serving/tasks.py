"""What ``parallel_model_trace`` needs to trace a model directory for a task: buckets, example inputs, metadata, files.

    plan = tasks.plan("model_dir", batch_sizes=[1, 4], length_buckets=[128, 512], max_len=1024)
    model = parallel_model_trace(**plan.trace_arguments(), tp_degree=2)

Buckets of a decoder: ``decode_b<B>`` (B rows of one token) for every batch size, ``verify_b<B>`` (B rows of a token and
``speculate`` guesses) beside it where that is asked for, ``prefill_s<S>`` (one row of S tokens) for every prompt
length, and ``mixed_b<B>`` (as ``decode``, with a row for every slot and PROMPT_ROWS for tokens of prompts). Buckets of
an encoder: ``b<B>_s<S>`` for every pair.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.errors import ModelConfigError
from nxd_infer.layout.sources import Weights
from nxd_models import registry
from nxd_models.bert import model as bert
from nxd_models.hf import generation_config
from nxd_models.hf import sentence_transformers as sentence
from nxd_models.hf import weights as hf
from nxd_models.hf.config import DecoderConfig, EncoderConfig
from nxd_models.serving.adapter_slots import RANK as LORA_RANK
from nxd_models.serving.adapter_slots import AdapterSlots
from nxd_models.serving.decoder_step import BIAS_SLOTS, MAX_DRAFT_TOKENS, DecoderStep, step_inputs
from nxd_models.serving.sampling import TOP_LOGPROBS

BATCH_SIZES = (1, 4)
LENGTH_BUCKETS = (128,)
PROMPT_ROWS = 16
"""Tokens of prompts that fit into a decode step beside all sequences; 32 rows cost little more than a piece of 32."""

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


@dataclass
class Buckets:
    """A ``bucket_config``: a name and the same ``func_kwargs`` for each bucket, and the smallest that fits at a call.

    It has the attributes of ``nxd_infer.trace.BucketModelConfig``, which stands above the models: it is not imported.
    """

    func_kwargs: dict[str, Any]
    names: list[str]
    bucket_kernel: None = None


@dataclass
class TaskPlan:
    """Everything that tracing a model directory for one task takes, except degree and backend."""

    task: str
    func: Callable[..., nn.Module]
    """Module-level, so that a spawned process can import it."""
    func_kwargs: dict[str, Any]
    example_inputs: list[dict[str, Tensor]]
    """One dictionary a bucket: input name -> example."""
    bucket_names: list[str]
    checkpoint_loader_callable: Callable[[], Any]
    metadata: dict[str, Any]
    files_to_copy: dict[str, Path] = field(default_factory=dict)
    """Name in the artifact -> file."""

    def trace_arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``parallel_model_trace``."""
        return {
            "func": self.func,
            "example_inputs": self.example_inputs,
            "bucket_config": Buckets(self.func_kwargs, self.bucket_names),
            "checkpoint_loader_callable": self.checkpoint_loader_callable,
            "inline_weights_to_neff": False,
            "metadata": self.metadata,
            "extra_files": self.files_to_copy,
        }


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
    spec = registry.load_config(model_dir)
    task = spec.task(task)
    batches = _sizes("batch_sizes", batch_sizes)
    lengths = _sizes("length_buckets", length_buckets)
    dtype = registry.DTYPES[spec.config.dtype] if dtype is None else dtype
    if isinstance(lora_slots, bool) or not isinstance(lora_slots, int) or lora_slots < 0:
        raise ModelConfigError(f"lora_slots = {lora_slots!r}: expected a whole number; 0 is none")
    lora = AdapterSlots.of(lora_slots, lora_rank, lora_targets)
    if isinstance(speculate, bool) or not isinstance(speculate, int) or not 0 <= speculate <= MAX_DRAFT_TOKENS:
        raise ModelConfigError(
            f"speculate = {speculate!r}: expected a whole number from 0 (none) to {MAX_DRAFT_TOKENS}"
        )
    if task == "generate":
        made = _generate(spec, batches, lengths, max_len, dtype, slots, bias_slots, lora, speculate)
    elif speculate:
        raise ModelConfigError(f"speculate = {speculate}: the task {task!r} guesses no tokens, generate does")
    elif lora is not None:
        raise ModelConfigError(f"lora_slots = {lora_slots}: the task {task!r} has no slots for adapters, generate has")
    else:
        options: dict[str, Any] = {}
        if task == "embed":
            options = {"pooling": "mean", "normalize": True, **sentence.pooling_options(spec.path)}
            options |= {k: v for k, v in (("pooling", pooling), ("normalize", normalize)) if v is not None}
        made = _encode(spec, task, batches, lengths, max_len, dtype, options)
    if weights is not None:
        made.checkpoint_loader_callable = functools.partial(named_weights, made.func, made.func_kwargs, weights)
    made.metadata["model_name"] = model_name or spec.path.resolve().name
    templates = sorted(f"{FURTHER_TEMPLATES}/{path.name}" for path in spec.path.glob(f"{FURTHER_TEMPLATES}/*.jinja"))
    names = [*SERVING_FILES, *templates]
    made.files_to_copy = {name: spec.path / name for name in names if (spec.path / name).is_file()}
    if task != "generate":
        made.files_to_copy |= {name: spec.path / name for name in sentence.files(spec.path)}
    return made


def _sizes(name: str, values: Sequence[int]) -> list[int]:
    found = sorted(set(values))
    if not found or any(isinstance(v, bool) or not isinstance(v, int) or v < 1 for v in found):
        raise ModelConfigError(f"{name} = {list(values)!r}: expected at least one whole number of at least 1")
    return found


def _generate(
    spec: registry.ModelSpec,
    batches: list[int],
    lengths: list[int],
    max_len: int | None,
    dtype: torch.dtype,
    slots: int | None,
    bias_slots: int,
    lora: AdapterSlots | None,
    speculate: int,
) -> TaskPlan:
    config = spec.config
    if not isinstance(config, DecoderConfig):
        raise ModelConfigError(f"{spec.path}: model_type = {config.model_type!r} is no decoder")
    max_len = min(config.max_length, 4096) if max_len is None else max_len
    config.check_length(max_len)
    slots = max(batches) if slots is None else slots
    if slots < max(batches):
        raise ModelConfigError(f"slots = {slots}: a batch of {max(batches)} rows needs as many slots")
    lengths = sorted({min(length, max_len) for length in lengths})
    if speculate and (speculate + 1 in lengths or speculate >= max_len):
        raise ModelConfigError(
            f"speculate = {speculate}: a step of {speculate + 1} tokens verifies guesses, so no prompt bucket may have "
            f"that length, nor max_len = {max_len} be less; choose another one of them"
        )
    shapes = {f"decode_b{b}": (b, 1) for b in batches}
    if slots > 1:
        shapes[f"mixed_b{slots + PROMPT_ROWS}"] = (slots + PROMPT_ROWS, 1)
    shapes |= {f"verify_b{b}": (b, speculate + 1) for b in batches if speculate}
    shapes |= {f"prefill_s{s}": (1, s) for s in lengths if s > 1}
    kwargs: dict[str, Any] = {"model_dir": str(spec.path), "dtype": dtype, "slots": slots, "max_len": max_len}
    kwargs |= {"bias_slots": bias_slots, "draft_tokens": speculate} | ({} if lora is None else {"adapters": lora})
    bos, eos = generation_config.special_tokens(spec.path, config)
    return TaskPlan(
        task="generate",
        func=decoder_step,
        func_kwargs=kwargs,
        example_inputs=[
            step_inputs(config.vocab_size, b, s, slots, bias_slots, adapter=lora is not None)
            for b, s in shapes.values()
        ],
        bucket_names=list(shapes),
        checkpoint_loader_callable=functools.partial(named_weights, decoder_step, kwargs),
        metadata={
            "task": "generate",
            "model_type": config.model_type,
            "vocab_size": config.vocab_size,
            "max_len": max_len,
            "slots": slots,
            "rows_share_slots": True,
            "prompt_buckets": lengths,
            "batch_sizes": batches,
            "dtype": str(dtype).removeprefix("torch."),
            "eos_token_ids": eos,
            "sampling_defaults": generation_config.sampling_defaults(spec.path),
            "bos_token_id": bos,
            "top_logprobs": TOP_LOGPROBS,
            "bias_slots": bias_slots,
            **({} if lora is None else {"lora": lora.metadata()}),
            **({"speculate": speculate} if speculate else {}),
        },
    )


def _encode(
    spec: registry.ModelSpec,
    task: str,
    batches: list[int],
    lengths: list[int],
    max_len: int | None,
    dtype: torch.dtype,
    options: dict[str, Any],
) -> TaskPlan:
    config = spec.config
    if not isinstance(config, EncoderConfig):
        raise ModelConfigError(f"{spec.path}: model_type = {config.model_type!r} is no encoder")
    limit, why = config.max_length, f"max_position_embeddings = {config.max_position} of this {config.model_type} model"
    text = sentence.longest_text(spec.path)
    if text is not None and text < limit:
        limit, why = text, f"max_seq_length = {text}, which sentence-transformers wrote beside the model"
    if max_len is not None and max_len > limit:
        raise ModelConfigError(f"max_len = {max_len} is beyond {why}; use at most {limit}")
    longest = min(max(lengths) if max_len is None else max_len, limit)
    lengths = sorted({min(length, longest) for length in lengths} | ({longest} if max_len is not None else set()))
    shapes = {f"b{b}_s{s}": (b, s) for b in batches for s in lengths}
    kwargs = {"model_dir": str(spec.path), "task": task, "dtype": dtype, **options}
    metadata: dict[str, Any] = {
        "task": task,
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "max_len": lengths[-1],
        "batch_sizes": batches,
        "length_buckets": lengths,
        "dtype": str(dtype).removeprefix("torch."),
        "pad_token_id": config.pad_token_id,
    }
    if task == "embed":
        dimensions = config.hidden_size * len(sentence.pooling_modes(options["pooling"]))
        metadata |= {"dimensions": dimensions, **options, **sentence.prompts(spec.path)}
    else:
        metadata |= {"labels": list(config.labels), "scores": config.scores}
    return TaskPlan(
        task=task,
        func=encoder_step,
        func_kwargs=kwargs,
        example_inputs=[_encoder_inputs(b, s) for b, s in shapes.values()],
        bucket_names=list(shapes),
        checkpoint_loader_callable=functools.partial(named_weights, encoder_step, kwargs),
        metadata=metadata,
    )


def _encoder_inputs(batch: int, length: int) -> dict[str, Tensor]:
    return {
        "input_ids": torch.zeros(batch, length, dtype=torch.int64),
        "attention_mask": torch.ones(batch, length, dtype=torch.int64),
        "token_type_ids": torch.zeros(batch, length, dtype=torch.int64),
    }


# --- functions that a trace calls, in whatever process -------------------------------------------------


def decoder_step(
    model_dir: str,
    dtype: torch.dtype,
    slots: int,
    max_len: int,
    bias_slots: int,
    adapters: AdapterSlots | None = None,
    draft_tokens: int = 0,
) -> nn.Module:
    """The step that is traced for generation, parallel over the current context; no weights are read."""
    config = registry.load_config(model_dir).config
    if not isinstance(config, DecoderConfig):
        raise ModelConfigError(f"{model_dir}: model_type = {config.model_type!r} is no decoder")
    return DecoderStep(
        config,
        dtype,
        slots=slots,
        max_len=max_len,
        bias_slots=bias_slots,
        adapters=adapters,
        draft_tokens=draft_tokens,
    ).eval()


def encoder_step(model_dir: str, task: str, dtype: torch.dtype, **options: Any) -> nn.Module:
    """The step that is traced for "embed" or "classify", parallel over the current context; no weights are read."""
    config = registry.load_config(model_dir).config
    if not isinstance(config, EncoderConfig):
        raise ModelConfigError(f"{model_dir}: model_type = {config.model_type!r} is no encoder")
    if task == "embed":
        return bert.EmbedStep(config, dtype, **options).eval()
    return bert.classify_step(config, dtype).eval()


def named_weights(
    func: Callable[..., nn.Module], kwargs: dict[str, Any], weights: Weights | None = None
) -> hf.NamedSource:
    """``weights``, or those of ``kwargs["model_dir"]``, under the names that the module of ``func`` reads, checked."""
    with torch.device("meta"):
        module = func(**kwargs)
    return hf.named_weights(module, hf.weights(kwargs["model_dir"]) if weights is None else weights)
