"""What a causal language model of transformers keeps of a text, found by running it on the meta device."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nxd_infer.errors import ModelConfigError
from nxd_infer.parallel_layers.base import parameters_on_meta, real_cpu_tensors
from nxd_models.generic import attention
from nxd_models.generic.build import instance
from nxd_models.generic.config import transformers_config
from nxd_models.generic.decoder import parts_of

_TOKENS = 3


@dataclass(frozen=True)
class CacheLayout:
    """The cache that holds the keys and values of every layer."""

    layers: int = 1
    kv_heads: int = 1
    group: int = 1
    """Query heads per key/value head."""
    head_dim: int = 1
    why_whole: str = ""
    """Why a cache cannot hold what the model keeps, so that each step reads the whole text; "" if it can."""


def layout_of(raw: Mapping[str, Any]) -> CacheLayout:
    """Return the layout for the model of ``raw``, the content of ``config.json``."""
    return _layout(json.dumps(raw, sort_keys=True, default=str))


@functools.lru_cache(maxsize=8)
def _layout(raw: str) -> CacheLayout:
    config = transformers_config(json.loads(raw))
    try:
        with torch.device("meta"):
            return _probed(instance("AutoModelForCausalLM", config, torch.float32, cached=True))
    except ModelConfigError as error:
        return CacheLayout(why_whole=str(error))
    except Exception as error:  # of whatever type the model's code raises
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
    try:
        with real_cpu_tensors(), parameters_on_meta():  # as it is traced
            instance("AutoModelForCausalLM", config, torch.float32)
    except Exception as error:
        raise ModelConfigError(f"transformers cannot build this {config.model_type} model: {why}") from error
    return CacheLayout(why_whole=why)


@torch.no_grad()
def _probed(model: Any) -> CacheLayout:
    parts = parts_of(model)
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64)
    with attention.recorded() as calls:
        hidden = parts.decoder(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=ids, use_cache=False)[0]
        parts.head(inputs_embeds=hidden, use_cache=False, return_dict=True)
    text = model.config.get_text_config(decoder=True)
    if sorted(call.layer for call in calls) != list(range(text.num_hidden_layers)):
        raise ModelConfigError(
            f"of its {text.num_hidden_layers} layers, not each attends once by transformers' attention interface"
        )
    heads, kv_heads = (max(getattr(call, name) for call in calls) for name in ("heads", "kv_heads"))
    if heads % kv_heads or any(kv_heads % call.kv_heads or call.heads != heads for call in calls):
        raise ModelConfigError("its layers have different numbers of heads")
    return CacheLayout(len(calls), kv_heads, heads // kv_heads, max(call.head_dim for call in calls))


def position_offset(raw: Mapping[str, Any]) -> int:
    """Return the row of the first token's position in an encoder's table: in some, the one after padding's."""
    with torch.device("meta"):
        model = instance("AutoModel", transformers_config(raw), torch.float32)
    tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    return max((getattr(table, "padding_idx", None) or -1) for table in (*tables, None)) + 1
