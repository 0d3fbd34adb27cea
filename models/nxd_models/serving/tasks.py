"""The arguments of ``parallel_model_trace`` for a model directory and a task: buckets, example inputs, files.

    plan = tasks.plan("model_dir", batch_sizes=[1, 4], prompt_buckets=[128, 512], max_len=1024)
    model = parallel_model_trace(**plan.trace_arguments(), tp_degree=2)

Buckets of a decoder: ``decode_b<B>`` (B rows of one token) for every batch size; if speculating also ``verify_b<B>``
(B rows of a token and ``speculate`` guesses); ``prefill_s<S>`` (one row of S tokens) for every prompt length; and
``mixed_b<B>`` (like ``decode``, with a row for every slot and PROMPT_ROWS for prompt tokens). Buckets of an encoder:
``b<B>_s<S>`` for every pair.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxd_infer.errors import ModelConfigError
from nxd_infer.hugging_face.gguf_file import model_directory
from nxd_infer.hugging_face.tokenizer import canonical_files
from nxd_infer.layout.sources import SafetensorsSource
from nxd_infer.util.dtypes import dtype_name, dtype_of
from nxd_infer.util.options import accepts_options
from nxd_models import registry
from nxd_models.hf import sentence_transformers as sentence
from nxd_models.hf.generation_config import GenerationConfig
from nxd_models.serving.adapter_slots import AdapterSlots
from nxd_models.serving.decoder_step import step_inputs
from nxd_models.serving.pooling import pooling_modes
from nxd_models.serving.sampling import TOP_LOGPROBS
from nxd_models.serving.task_options import LONGEST_BY_DEFAULT, TaskOptions
from nxd_models.serving.task_plan import TaskPlan, directory_of, make_plan
from nxd_models.spec import TRANSFORMERS, DecoderConfig, EncoderConfig, ModelDirectory

SERVING_FILES = ("config.json", "generation_config.json")
"""Files that a server needs besides the graphs, the tokenizer and its templates; copied if present, with the files of
sentence-transformers."""

PROMPT_ROWS = 16
"""Prompt tokens that fit into a decode step beside all sequences; 32 rows cost little more than a piece of 32."""

LABELLED = ("classify", "token-classification")
"""Tasks whose logits are those of labels."""


@accepts_options(TaskOptions)
def plan(options: TaskOptions) -> TaskPlan:
    """Return what tracing a model directory for a task takes.

    Args:
        {arguments}

    Raises ModelConfigError naming the argument or the field of ``config.json``.
    """
    _check_head(options)
    directory = _directory(options)
    task = directory.task(options.task)
    if task != "generate" and options.speculate:
        raise ModelConfigError(f"speculate = {options.speculate}: the task {task!r} guesses no tokens, generate does")
    if task != "generate" and options.chat_template is not None:
        raise ModelConfigError(f"chat_template = {options.chat_template!r}: the task {task!r} has no conversations")
    if task != "generate" and options.lora_slots:
        raise ModelConfigError(
            f"lora_slots = {options.lora_slots}: the task {task!r} has no slots for adapters, generate has"
        )
    if directory.spec.model_impl is not None and options.lora_slots:
        raise ModelConfigError(
            f"lora_slots = {options.lora_slots}: a module of {directory.spec.model_impl} has no slots for adapters; "
            f"families of nxd_models have{f' ({directory.why})' if directory.why else ''}"
        )
    if directory.spec.encodes_prompts and options.lora_slots:
        raise ModelConfigError(
            f"lora_slots = {options.lora_slots}: a model with an encoder has no slots for adapters; merge the adapter "
            "into the model and trace that"
        )
    if task != "generate" and options.hidden_states:
        raise ModelConfigError(
            f"hidden_states = {options.hidden_states!r}: the task {task!r} has no heads, generate has"
        )
    rounds = options.kv_cache_dtype != "auto"
    if rounds and (task != "generate" or directory.spec.encodes_prompts or getattr(directory.config, "why_whole", "")):
        raise ModelConfigError(
            f"kv_cache_dtype = {options.kv_cache_dtype!r}: this {directory.config.model_type} model, traced for "
            f"{task!r}, is no decoder with a cache of ours; leave it out"
        )
    result = _plan_generate(directory, options) if task == "generate" else _plan_encode(directory, task, options)
    path = directory.path
    result.metadata["model_name"] = options.model_name or path.resolve().name
    if directory.why:
        result.metadata["why_transformers"] = directory.why
    if whole := getattr(directory.config, "why_whole", ""):
        result.metadata["why_whole"] = whole
    if (library := directory.spec.model_impl) is not None:
        result.func_kwargs["model_impl"] = result.metadata["model_impl"] = library
    if options.head_of is not None:  # the files of its target, by which an engine knows that one
        path = model_directory(options.head_of)
    encodes = task != "generate"
    names = [*SERVING_FILES, *(sentence.files(path) if encodes else [])]
    result.files |= {name: path / name for name in names if (path / name).is_file()}
    lowercase = encodes and sentence.lowercases(path)
    result.files |= canonical_files(path, lowercase=lowercase, chat_template=options.chat_template)
    return result


def _check_head(options: TaskOptions) -> None:
    """Raise ModelConfigError for options that a head does not have, and for a head that is to be traced as a model."""
    if options.head_of is None:
        path = Path(options.model_dir)
        files = options.weights is None and any(path.glob("*.safetensors"))
        names = set(SafetensorsSource(path).keys()) if files else set()
        if "fc.weight" in names and any(name.startswith(("midlayer.", "layers.0.")) for name in names):
            raise ModelConfigError(f"{path} is an EAGLE head: name the model that it guesses for with --head-of")
        return
    names = ("model_impl", "chat_template", "weights", "lora_slots", "hidden_states")
    if given := [name for name in names if getattr(options, name)]:
        raise ModelConfigError(f"{given[0]} = {getattr(options, given[0])!r}: a head (head_of) has none; leave it out")


def _directory(options: TaskOptions) -> ModelDirectory:
    """Read the directory; for transformers' module if only that can have contexts of ``max_len``."""
    if options.head_of is not None:
        return directory_of(options.model_dir, head_of=options.head_of)
    found = registry.load_config(options.model_dir, options.model_impl, options.task)
    length, config = options.max_len, found.config
    if length is None or not isinstance(config, DecoderConfig) or options.model_impl not in (None, "auto"):
        return found
    try:
        config.check_cached_length(length)
    except ModelConfigError as error:
        if found.spec.model_impl == TRANSFORMERS or found.spec.encodes_prompts:
            raise
        other = registry.load_config(found.path, TRANSFORMERS)
        if not isinstance(other.config, DecoderConfig) or other.config.max_length < length:
            raise
        return dataclasses.replace(other, why=str(error))
    return found


def _plan_generate(directory: ModelDirectory, options: TaskOptions) -> TaskPlan:
    """Plan one generation step, in every shape that the engine uses; see :func:`plan`."""
    config = directory.config
    if not isinstance(config, DecoderConfig):
        raise ModelConfigError(f"{directory.path}: model_type = {config.model_type!r} is not a decoder")
    max_len = min(config.usual_length, LONGEST_BY_DEFAULT) if options.max_len is None else options.max_len
    config.check_cached_length(max_len)
    batches, speculate, bias_slots = sorted(set(options.batch_sizes)), options.speculate, options.bias_slots
    slots = max(batches) if options.slots is None else options.slots
    if slots < max(batches):
        raise ModelConfigError(f"slots = {slots}: a batch of {max(batches)} rows needs as many slots")
    whole = directory.spec.encodes_prompts
    # A prompt that is read whole needs a graph that holds it.
    lengths = sorted({min(length, max_len) for length in options.prompt_buckets} | ({max_len} if whole else set()))
    if speculate and (speculate + 1 in lengths or speculate >= max_len):
        raise ModelConfigError(
            f"speculate = {speculate}: a step of {speculate + 1} tokens verifies guesses, so no prompt bucket may have "
            f"that length, nor max_len = {max_len} be less; choose another one of them"
        )
    shapes = {f"decode_b{b}": (b, 1) for b in batches}
    head = directory.spec.head
    if slots > 1 and not whole and head is None:
        shapes[f"mixed_b{slots + PROMPT_ROWS}"] = (slots + PROMPT_ROWS, 1)
    # A head does not verify: it reads what was.
    shapes |= {f"{'verify' if head is None else 'read'}_b{b}": (b, speculate + 1) for b in batches if speculate}
    shapes |= {f"prefill_s{s}": (1, s) for s in lengths if s > 1}
    dtype = options.dtype or dtype_of(config.dtype)
    targets = options.lora_targets or directory.spec.adapter_targets
    lora = AdapterSlots.of(options.lora_slots, options.lora_rank, targets)
    kwargs: dict[str, Any] = {"model_dir": str(directory.path), "task": "generate", "dtype": dtype}
    verified = speculate if head is None else 0
    kwargs |= {"slots": slots, "max_len": max_len, "bias_slots": bias_slots, "draft_tokens": verified}
    kwargs |= {} if options.head_of is None else {"head_of": str(options.head_of)}
    gives = _given(directory, options)
    kwargs |= {} if gives is None else {"gives": options.hidden_states}
    kwargs |= {} if lora is None else {"adapters": lora}
    rounds = options.kv_cache_dtype != "auto"
    kwargs |= {"kv_cache_dtype": dtype_of(options.kv_cache_dtype)} if rounds else {}
    file = GenerationConfig.of(directory.path)
    bos, eos = file.special_tokens(config)
    metadata: dict[str, Any] = {
        "task": "generate",
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "max_len": max_len,
        "slots": slots,
        "rows_share_slots": not whole,
        "prompt_buckets": lengths,
        "batch_sizes": batches,
        "dtype": dtype_name(dtype),
        "eos_token_ids": eos,
        "sampling_defaults": file.sampling_defaults(),
        "bos_token_id": bos,
        "top_logprobs": TOP_LOGPROBS,
        "bias_slots": bias_slots,
        **({"encodes_prompts": True} if whole else {}),
        **({"kv_cache_dtype": options.kv_cache_dtype} if rounds else {}),
        **({"generation_without_effect": unused} if (unused := file.without_effect()) else {}),
        **({} if lora is None else {"lora": lora.metadata()}),
        **({"speculate": verified} if verified else {}),
        **({} if gives is None else {"hidden_states": gives}),
        **({} if head is None else {"head": head}),
    }
    buckets = {
        name: step_inputs(config.vocab_size, b, s, slots, bias_slots, adapter=lora is not None)
        for name, (b, s) in shapes.items()
    }
    if head is not None:
        for name, (b, s) in shapes.items():
            buckets[name]["hidden"] = torch.zeros(b, s, head["features"])
            buckets[name]["ahead"] = torch.zeros(b, dtype=torch.int64)
    return make_plan("generate", kwargs, buckets, metadata, options.weights)


def _given(directory: ModelDirectory, options: TaskOptions) -> dict[str, Any] | None:
    """Return the kind of the hidden states that the graphs are to give, and how many numbers they are."""
    kind, config, able = options.hidden_states, directory.config, directory.spec.gives_hidden_states
    if kind is None:
        return None
    if not able or (kind == "eagle3" and config.num_layers < 3):
        why = f"{config.num_layers} layers, of which it reads three" if able else "other modules"
        whose = "models of the Llama family, natively traced, give them"
        raise ModelConfigError(f"hidden_states = {kind!r}: {whose}; {directory.path} has {why}")
    return {"kind": kind, "features": config.hidden_size * (3 if kind == "eagle3" else 1)}


def _plan_encode(directory: ModelDirectory, task: str, options: TaskOptions) -> TaskPlan:
    """Plan one call of an encoder, for every batch size and length; see :func:`plan`."""
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
    cut = {min(length, longest) for length in options.prompt_buckets}
    lengths = sorted(cut if max_len is None else {*cut, longest})
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
        if module.get("dense"):
            dimensions = module["dense"][-1]["outputs"]
        metadata |= {"dimensions": dimensions, **module, **sentence.prompts(directory.path)}
        metadata |= sentence.matryoshka(directory.raw)
    elif task in LABELLED:
        metadata |= {"labels": list(config.labels), "scores": config.scores}
    buckets = {name: _example(b, s) for name, (b, s) in shapes.items()}
    return make_plan(task, kwargs, buckets, metadata, options.weights)


def _example(batch: int, length: int) -> dict[str, Tensor]:
    return {
        "input_ids": torch.zeros(batch, length, dtype=torch.int64),
        "attention_mask": torch.ones(batch, length, dtype=torch.int64),
        "token_type_ids": torch.zeros(batch, length, dtype=torch.int64),
    }
