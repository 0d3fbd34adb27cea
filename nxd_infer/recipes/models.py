"""The model of a recipe: ``config.json``, dtypes, its module with adapters and stages, and what cannot be trained."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nxd_infer.errors import LoraTargetError, ModelConfigError, RecipeError
from nxd_infer.hugging_face.gguf_file import model_directory
from nxd_infer.hugging_face.quantized.formats import dequantized
from nxd_infer.modules.lora import LoraConfig
from nxd_infer.recipes.logs import missing_packages
from nxd_infer.recipes.recipe import Loaded
from nxd_infer.recipes.schema import Model, Moe, Peft, Recipe
from nxd_infer.util.devices import has_accelerator
from nxd_infer.util.machine import computes_bfloat16
from nxd_infer.util.options import declared
from nxd_models import registry
from nxd_models.spec import ModelDirectory

CONFIG = "config.json"
OWN_NAMES = {"rms_norm_eps": "layer_norm_eps", "rope_theta": "rotary_emb_base"}
"""Names of GPT-NeoX for these fields; set where its configuration has them."""
NEEDED = ("num_layers", "hidden_size", "num_attention_heads")
TRAINED = {
    "activation": ("swiglu", "fast-swiglu", "silu"),
    "normalization": ("rmsnorm",),
    "position_embedding_type": ("rope",),
    "transformer_block_type": ("pre_ln",),
}
"""What a model without a ``config.json`` may have, and other names of it."""
OF_EXPERTS = {
    "capacity_factor": (0.0,),
    "frequency": (1,),
    "dropout": (0.0,),
    "routing_algorithm": ("top_k", "topk"),
    "router_activation": ("softmax",),
    "normalize_top_k_affinities": (True,),
}
"""What a mixture of experts may have, the first by default."""
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers that NxD Training joins, and what they are here; adapters name them."""


def config_path(loaded: Loaded) -> Path | None:
    """Return the configuration that the recipe names; None without one. Raises RecipeError if it is not there."""
    given = loaded.recipe.model.model_config
    if given is None:
        return None
    path = model_directory(loaded.path(given))
    path = path / CONFIG if path.is_dir() else path
    if not path.is_file():
        problem = f"= {given!r} is not there: give a config.json or its directory"
        raise loaded.tree.error("model.model_config", problem)
    return path


def raw_config(loaded: Loaded, vocab_size: int | None = None) -> dict[str, Any]:
    """Return the content of ``config.json``: the named file with the recipe's keys in place of its fields.

    ``vocab_size``: of the tokenizer, for a recipe whose configuration does not say it.
    Raises RecipeError for a configuration that is not there, or incomplete.
    """
    recipe, model = loaded.recipe, loaded.recipe.model
    path = config_path(loaded)
    raw: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32"}
    if path is not None:
        try:
            raw = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise RecipeError(f"{path} is not JSON: {error}") from None
        raw = dequantized(raw, str(path))
    else:
        missing = [name for name in NEEDED if getattr(model, name) is None]
        if missing:
            problem = "is missing, and there is no model.model_config: give it, or model_config"
            raise loaded.tree.error(f"model.{missing[0]}", problem)
        raw["rms_norm_eps"] = 1e-5
        raw["max_position_embeddings"] = recipe.seq_length
        raw["intermediate_size"] = 4 * (model.hidden_size or 0)
        raw["hidden_act"] = "silu"
        if model.moe is not None:
            raw |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
            raw["num_key_value_heads"] = model.num_attention_heads
    if model.has_bias is not None:
        raw["attention_bias"] = raw["mlp_bias"] = model.has_bias
    if model.moe is not None:
        raw["num_experts" if "num_experts" in raw else "num_local_experts"] = model.moe.num_experts
        raw["num_experts_per_tok"] = model.moe.top_k
        raw |= {one.field: getattr(model.moe, name) for name, one in declared(Moe).items() if one.field}
    for name, one in declared(Model).items():
        if one.field and (value := getattr(model, name)) is not None:
            own = OWN_NAMES.get(one.field)
            raw[own if own in raw else one.field] = value
    if model.rope_theta is not None and isinstance(raw.get("rope_parameters"), dict):  # transformers 5 has it there
        raw["rope_parameters"] = {**raw["rope_parameters"], "rope_theta": model.rope_theta}
    if "vocab_size" not in raw:
        step = model.make_vocab_size_divisible_by * recipe.distributed_strategy.tensor_model_parallel_size
        raw["vocab_size"] = math.ceil((vocab_size or recipe.data.tokenizer.vocab_size) / step) * step
    return {**raw, **model.extra}


@dataclasses.dataclass(frozen=True)
class Dtypes:
    weights: torch.dtype
    master_weights: bool
    fp32_grad_acc: bool
    autocast: bool
    """Whether matrix products run in bfloat16, whatever the weights are."""

    @property
    def products(self) -> torch.dtype:
        return torch.bfloat16 if self.autocast else self.weights


def dtypes(recipe: Recipe, here: bool = True) -> Dtypes:
    """Return what a recipe trains in, by default what is fast ``here``, or on a chip.

    Stochastic rounding is Trainium's; the rounding here is to the nearest.
    """
    precision = recipe.precision
    kind = precision.type or ("mixed_precision" if not here or is_fast_at_bfloat16() else "fp32")
    if kind in ("fp32", "autocast"):
        return Dtypes(torch.float32, False, False, kind == "autocast")
    wide = kind.startswith("mixed_precision")
    weights = torch.bfloat16
    if kind == "manual":
        narrow = {str(precision.xla_use_bf16), str(precision.xla_downcast_bf16)} & {"1", "True", "true"}
        weights = torch.bfloat16 if narrow else torch.float32
    masters = wide if precision.master_weights is None else precision.master_weights
    sums = wide if precision.fp32_grad_acc is None else precision.fp32_grad_acc
    return Dtypes(weights, masters and weights != torch.float32, sums and weights != torch.float32, False)


def is_fast_at_bfloat16() -> bool:
    """Whether this machine has instructions for bfloat16."""
    return computes_bfloat16() or has_accelerator()


def build(raw: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build the causal language model of a configuration, newly initialised."""
    spec = registry.find(raw.get("model_type"))
    config = registry.parse_config(raw)
    directory = ModelDirectory(Path(), spec, config, tuple(raw.get("architectures") or ()), raw)
    return directory.make("generate", dtype)


def lora_config(peft: Peft) -> LoraConfig:
    """Return the options of adapters; weights in checkpoints are the adapter's own."""
    known = {one.name for one in dataclasses.fields(LoraConfig)}
    given = {name: value for name, value in dataclasses.asdict(peft).items() if name in known and value is not None}
    targets = [name for target in peft.target_modules for name in (target, *JOINED.get(target, ()))]
    given |= {"save_lora_base": False, "merge_lora": False, "target_modules": targets or None}
    return LoraConfig(**{**given, "bias": peft.lora_bias})


@contextlib.contextmanager
def naming_targets(loaded: Loaded) -> Iterator[None]:
    """Raise RecipeError with the key's line if the recipe's adapters do not fit the model inside the block."""
    try:
        yield
    except LoraTargetError as error:
        peft = loaded.recipe.model_alignment_strategy.peft
        key = "lora_save_dir" if peft is not None and peft.load_lora_from_ckpt else "target_modules"
        raise loaded.tree.error(f"model_alignment_strategy.peft.{key}", f"does not fit the model: {error}") from None


def pipeline_options(recipe: Recipe) -> dict[str, Any]:
    strategy = recipe.distributed_strategy
    cuts = recipe.model.pipeline_cuts
    return {
        "num_microbatches": recipe.microbatches,
        "virtual_pipeline_size": strategy.virtual_pipeline_model_parallel_size,
        "schedule": strategy.pipeline_schedule,
        **({"pipeline_cuts": cuts} if cuts else {"auto_partition": True}),
    }


def _untrainable(loaded: Loaded) -> str:
    """Return why the model type that a recipe names cannot be trained; "" if it can."""
    path = config_path(loaded)
    if path is None:
        return ""
    kind = raw_config(loaded).get("model_type")
    try:
        spec = registry.find(kind, str(path))
    except ModelConfigError as error:
        return str(error)
    task = spec.tasks.get("generate")
    if task is not None and "labels" in inspect.signature(getattr(task.module, "forward", task.module)).parameters:
        return ""
    return (
        f"recipes have no causal language model for model_type {kind!r}: train it with nxd_infer.distributed "
        "(docs/transformers.md), or add a family (docs/recipes.md)"
    )


def obstacles(loaded: Loaded) -> list[str]:
    """Return why a valid recipe cannot be trained here, as sentences with the key and its line; none if it can."""
    recipe, model, strategy = loaded.recipe, loaded.recipe.model, loaded.recipe.distributed_strategy
    found: dict[str, str] = {}
    if untrainable := _untrainable(loaded):
        found["model.model_config"] = untrainable
    for name, trained in OF_EXPERTS.items() if model.moe is not None else ():
        if getattr(model.moe, name) not in trained:
            found[f"model.moe.{name}"] = f"only experts with {trained[0]} are trained here"
    if strategy.context_parallel_size > 1:
        instead = "use tensor_model_parallel_size with sequence_parallel"
        found["distributed_strategy.context_parallel_size"] = f"sequences are not split among ranks here: {instead}"
    if model.model_config is None:
        for name, (trained, *same) in TRAINED.items():
            if getattr(model, name) not in (None, trained, *same):
                found[f"model.{name}"] = f"only {trained} is trained here"
    if recipe.model_alignment_strategy.dpo is not None and strategy.pipeline_model_parallel_size > 1:
        instead = "use tensor_model_parallel_size, or orpo"
        found["model_alignment_strategy.dpo"] = f"the reference of DPO does not run over pipeline stages: {instead}"
    for key, package in missing_packages(recipe.exp_manager).items():
        found[f"exp_manager.{key}"] = f"needs the package {package}: pip install {package}, or set it to false"
    return [f"{loaded.tree.where(key)}: {key}: {reason}" for key, reason in found.items()]
