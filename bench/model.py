"""The model that the benchmarks trace: a seeded random Llama with a tokenizer, written as Hugging Face does."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from nxd_infer.cli.demo.corpus import documents, write_tokenizer


def write_llama(
    directory: Path,
    hidden: int = 512,
    layers: int = 2,
    heads: int = 8,
    kv_heads: int = 4,
    intermediate: int = 1408,
    vocab: int = 8192,
    max_len: int = 1024,
    seed: int = 0,
) -> Path:
    """Write config.json, model.safetensors (bfloat16) and the tokenizer; returns ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory, documents())
    head_dim = hidden // heads
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": max_len,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for i in range(layers):
        block = f"model.layers.{i}"
        shapes |= {
            f"{block}.input_layernorm.weight": (hidden,),
            f"{block}.post_attention_layernorm.weight": (hidden,),
            f"{block}.self_attn.q_proj.weight": (heads * head_dim, hidden),
            f"{block}.self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            f"{block}.self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            f"{block}.self_attn.o_proj.weight": (hidden, heads * head_dim),
            f"{block}.mlp.gate_proj.weight": (intermediate, hidden),
            f"{block}.mlp.up_proj.weight": (intermediate, hidden),
            f"{block}.mlp.down_proj.weight": (hidden, intermediate),
        }
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: (torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * shape[-1] ** -0.5)
        for name, shape in shapes.items()
    }
    save_file({name: tensor.bfloat16() for name, tensor in state.items()}, directory / "model.safetensors")
    return directory
