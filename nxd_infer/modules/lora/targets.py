"""The words of ``target_modules``, and the names that they match."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from nxd_infer.errors import LoraTargetError
from nxd_infer.modules.lora.config import LoraConfig

DEFAULT_TARGETS = {
    "bert": ("query", "value"),
    "gpt_neox": ("query_key_value",),
    "llama": ("q_proj", "v_proj"),
    "mistral": ("q_proj", "v_proj"),
    "mixtral": ("q_proj", "v_proj"),
    "qwen2": ("q_proj", "v_proj"),
    "qwen3": ("q_proj", "v_proj"),
    "roberta": ("query", "value"),
}
"""Default ``target_modules`` by ``model.config.model_type``: the projections that PEFT adapts."""


def words_of(config: LoraConfig, module: nn.Module) -> Sequence[str] | str:
    """Return ``target_modules``, or the default of a known model type. Raises LoraTargetError for another one."""
    if config.target_modules is not None:
        return config.target_modules
    kind = getattr(getattr(module, "config", None), "model_type", None)
    if kind not in DEFAULT_TARGETS:
        raise LoraTargetError(
            f"LoRA: there are no default target_modules for the model type {kind!r}; pass target_modules=[...]"
        )
    return DEFAULT_TARGETS[kind]


def contains(name: str, words: Sequence[str] | str) -> bool:
    """Return whether a name contains one of the words, or matches the regular expression."""
    if isinstance(words, str):
        return words in name or re.fullmatch(words, name) is not None
    return any(word in name for word in words)
