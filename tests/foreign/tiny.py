"""Tiny models of any architecture in transformers, with random weights: generic sizes put into its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

VOCABULARY, POSITIONS = 96, 64
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocabulary_size", "n_vocab", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), POSITIONS
    ),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size", "lru_width"), 32),
    **dict.fromkeys(
        ("intermediate_size", "ffn_hidden_size", "ffn_dim", "d_inner", "d_ff", "hidden_dim", "n_inner"), 48
    ),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "dense_intermediate_size", "ffn_intermediate_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    "decoder_attention_heads": 4,
    **dict.fromkeys(("num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "attention_head_size", "kv_channels", "d_kv", "global_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "experts_per_token"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "n_group", "topk_group"), 1),
    "hidden_size_per_layer_input": 8,
    "rotary_dim": 4,
    "partial_rotary_factor": 0.5,
    "query_pre_attn_scalar": 8,
    "attention_window": 8,
    "sliding_window": 6,
    "window_size": 6,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "state_size": 8,
    "num_labels": 3,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "use_cache": True,
}
"""By name, what a configuration gets if it has a field of this name."""
OWN: dict[str, dict[str, Any]] = {
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1]},
    "mamba2": {"num_heads": 8},
    "falcon": {"alibi": True},
    "recurrent_gemma": {"num_hidden_layers": 3},
}
"""By model type, what the generic sizes do not fit."""


def tiny_config(kind: str, *, decodes: bool = False) -> Any:
    """Return a small configuration of a model type, without dropout. Raises whatever transformers raises.

    ``decodes``: of a type that can be an encoder or a decoder, a decoder.
    """
    import transformers

    made = transformers.AutoConfig.for_model(kind)
    fields = made.to_dict()
    more = {"is_decoder": True} if decodes and "is_decoder" in fields else {}
    return type(made)(**{**_sized(fields), **OWN.get(kind, {}), **more})


def _sized(fields: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in SIZES.items() if fields.get(name) is not None or name.endswith("_token_id")}
    found |= {name: 0.0 for name, value in fields.items() if isinstance(value, float) and _drops(name)}
    if "qk_rope_head_dim" in fields:
        found.pop("partial_rotary_factor", None)
        found["num_key_value_heads"] = 4
    for name, value in fields.items():
        if isinstance(value, dict) and name in ("text_config", "decoder", "decoder_config"):
            found[name] = {**value, **_sized(value)}
    if isinstance(kinds := fields.get("layer_types"), list):
        own = list(dict.fromkeys(kinds))
        count = max(2, len(own))
        found["layer_types"] = (own * count)[:count]
        found |= {name: count for name in ("num_hidden_layers", "n_layer", "num_layers") if name in found}
    return found


def _drops(name: str) -> bool:
    return any(word in name for word in ("dropout", "_pdrop", "layerdrop", "drop_path", "drop_rate"))


def tiny_model(config: Any, head: str) -> nn.Module:
    """Return transformers' ``head`` (such as ``AutoModel``) with weights that make every part of it matter."""
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, head).from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)
            else:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.05)
    return model


def write_model(model: Any, path: Path) -> Path:
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(path)
    return path
