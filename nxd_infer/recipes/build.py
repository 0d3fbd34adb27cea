"""What a recipe makes: the model, and the options of its adapters and of its pipeline; a plan counts the same."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nxd_infer.errors import LoraTargetError
from nxd_infer.modules.lora import LoraConfig, LoRAModel
from nxd_infer.recipes.recipe import Loaded, microbatches
from nxd_infer.recipes.schema import Peft, Recipe
from nxd_models import registry
from nxd_models.spec import ModelDirectory

JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers that NxD Training joins, and what they are here; adapters name them."""


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


def require_mergeable(model: nn.Module) -> None:
    """Raise LoraTargetError if the adapters of a model cannot be merged, as a job's last step does."""
    if isinstance(model, LoRAModel):
        model.require_mergeable()


@contextlib.contextmanager
def naming_targets(loaded: Loaded) -> Iterator[None]:
    """Raise RecipeError with the key's line if the recipe's adapters do not fit the model inside the block."""
    try:
        yield
    except LoraTargetError as error:
        peft = loaded.recipe.model_alignment_strategy.peft
        key = "lora_save_dir" if peft is not None and peft.load_lora_from_ckpt else "target_modules"
        raise loaded.tree.error(("model_alignment_strategy", "peft", key), f"does not fit the model: {error}") from None


def pipeline_options(recipe: Recipe) -> dict[str, Any]:
    strategy = recipe.distributed_strategy
    cuts = recipe.model.pipeline_cuts
    return {
        "num_microbatches": microbatches(recipe),
        "virtual_pipeline_size": strategy.virtual_pipeline_model_parallel_size,
        "schedule": strategy.pipeline_schedule,
        **({"pipeline_cuts": cuts} if cuts else {"auto_partition": True}),
    }
