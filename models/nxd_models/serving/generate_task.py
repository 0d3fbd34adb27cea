"""The plan of the task "generate": graphs for decoding, prompts and drafts, and the engine's metadata."""

from __future__ import annotations

from typing import Any

from nxd_infer.errors import ModelConfigError
from nxd_infer.util.dtypes import dtype_name, dtype_of
from nxd_models.hf.generation_config import GenerationConfig
from nxd_models.serving.adapter_slots import AdapterSlots
from nxd_models.serving.decoder_step import step_inputs
from nxd_models.serving.sampling import TOP_LOGPROBS
from nxd_models.serving.task_options import LONGEST_BY_DEFAULT, TaskOptions
from nxd_models.serving.task_plan import TaskPlan, make_plan
from nxd_models.spec import DecoderConfig, ModelDirectory

PROMPT_ROWS = 16
"""Prompt tokens that fit into a decode step beside all sequences; 32 rows cost little more than a piece of 32."""


def plan_generate(directory: ModelDirectory, options: TaskOptions) -> TaskPlan:
    """Plan one generation step, in every shape that the engine uses; see :func:`nxd_models.serving.tasks.plan`."""
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
    if slots > 1 and not whole:
        shapes[f"mixed_b{slots + PROMPT_ROWS}"] = (slots + PROMPT_ROWS, 1)
    shapes |= {f"verify_b{b}": (b, speculate + 1) for b in batches if speculate}
    shapes |= {f"prefill_s{s}": (1, s) for s in lengths if s > 1}
    dtype = options.dtype or dtype_of(config.dtype)
    targets = options.lora_targets or directory.spec.adapter_targets
    lora = AdapterSlots.of(options.lora_slots, options.lora_rank, targets)
    kwargs: dict[str, Any] = {"model_dir": str(directory.path), "task": "generate", "dtype": dtype}
    kwargs |= {"slots": slots, "max_len": max_len, "bias_slots": bias_slots, "draft_tokens": speculate}
    kwargs |= {} if lora is None else {"adapters": lora}
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
        **({} if lora is None else {"lora": lora.metadata()}),
        **({"speculate": speculate} if speculate else {}),
    }
    buckets = {
        name: step_inputs(config.vocab_size, b, s, slots, bias_slots, adapter=lora is not None)
        for name, (b, s) in shapes.items()
    }
    return make_plan("generate", kwargs, buckets, metadata, options.weights)
