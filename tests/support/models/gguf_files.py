"""Small GGUF files as llama.cpp's converter writes them, made by the package ``gguf`` from one of our tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

from tests.support.tiny_models import write_tiny

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Rows that blocks of 32 divide."""
QUANTISED = (Kind.Q4_0, Kind.Q8_0, Kind.Q4_1, Kind.F16, Kind.F32)


def write_gguf(
    path: Path,
    kinds: tuple[Kind, ...] = QUANTISED,
    family: str = "llama",
    rope_factors: np.ndarray | None = None,
    **metadata: int | str,
) -> Path:
    """Write a tiny model whose matrices have ``kinds`` in turn, with its byte-level tokenizer and chat template;
    ``rope_factors`` divide the frequencies of the rotary positions, ``metadata`` are further numbers and texts, ``__``
    for a dot. Return ``path``."""
    sizes = {**SIZES, "head_dim": 128} if family == "qwen3" else SIZES  # as transformers takes all of them to have
    source = write_tiny(family, path.parent / f"{path.stem}-source", **sizes)
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(str(path), family)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config.get("head_dim", config["hidden_size"] // heads))
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _add_tokenizer(writer, source, config)
    for name, value in metadata.items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_string)(name.replace("__", "."), value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config["num_hidden_layers"])
    for number, (name, tensor) in enumerate(sorted(load_file(source / "model.safetensors").items())):
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = _interleaved(tensor, heads if "q_proj" in name else kv_heads)
        kind = Kind.F32 if tensor.ndim == 1 else kinds[number % len(kinds)]
        data = gguf.quantize(tensor.astype(np.float32), kind)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=kind)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32), raw_dtype=Kind.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of queries or keys as llama.cpp rotates them: pairs of neighbours, not halves of a head."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _add_tokenizer(writer: gguf.GGUFWriter, source: Path, config: dict) -> None:
    model = json.loads((source / "tokenizer.json").read_text())
    special = {token["id"] for token in model["added_tokens"]}
    ids = {**{token["content"]: token["id"] for token in model["added_tokens"]}, **model["model"]["vocab"]}
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if number in special else normal for number in range(len(tokens))])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(True)
    writer.add_chat_template(json.loads((source / "tokenizer_config.json").read_text())["chat_template"])
