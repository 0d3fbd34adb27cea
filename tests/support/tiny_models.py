"""Tiny seeded model directories in the Hugging Face layout, made without transformers: ``write_tiny("llama", folder)``.
Weights depend on (family, name, shape, seed) alone; overrides are fields of config.json."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB_SIZE = 288
"""256 bytes, five special tokens and a few merges; a multiple of 32 so that tests can ask for an odd one."""

SPECIAL_TOKENS = ("<|pad|>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>")
PAD, BOS, EOS = 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}{% endif %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>{% endif %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_DECODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "torch_dtype": "float32",
}
_ENCODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 128,
    "type_vocab_size": 2,
    "vocab_size": VOCAB_SIZE,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": PAD,
    "torch_dtype": "float32",
}
_LABELS = {"id2label": {"0": "bad", "1": "fair", "2": "good"}, "label2id": {"bad": 0, "fair": 1, "good": 2}}


def _family(base: dict[str, Any], model_type: str, architecture: str, **more: Any) -> dict[str, Any]:
    return {**base, "model_type": model_type, "architectures": [architecture], **more}


_LLAMA3 = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "tie_word_embeddings": True,
}
# As the real one: begin is 0 and padding 1, and positions count from padding + 1.
_ROBERTA = {"type_vocab_size": 1, "pad_token_id": BOS, "bos_token_id": PAD}
_QWEN3_MOE = {
    **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": True},
    **{"num_hidden_layers": 3, "mlp_only_layers": [1], "decoder_sparse_step": 1},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _family(_DECODER, "llama", "LlamaForCausalLM"),
    "llama3": _family(_DECODER, "llama", "LlamaForCausalLM", **_LLAMA3),
    "mistral": _family(_DECODER, "mistral", "MistralForCausalLM", sliding_window=None, head_dim=16),
    "qwen2": _family(_DECODER, "qwen2", "Qwen2ForCausalLM", use_sliding_window=False, tie_word_embeddings=True),
    "qwen3": _family(_DECODER, "qwen3", "Qwen3ForCausalLM", head_dim=16),
    "mixtral": _family(_DECODER, "mixtral", "MixtralForCausalLM", num_local_experts=6, num_experts_per_tok=2),
    "qwen3_moe": _family(_DECODER, "qwen3_moe", "Qwen3MoeForCausalLM", head_dim=16, **_QWEN3_MOE),
    "bert": _family(_ENCODER, "bert", "BertModel"),
    "roberta": _family(_ENCODER, "roberta", "RobertaModel", **_ROBERTA),
    "bert_classifier": _family(_ENCODER, "bert", "BertForSequenceClassification", **_LABELS),
    "roberta_classifier": _family(_ENCODER, "roberta", "RobertaForSequenceClassification", **_ROBERTA, **_LABELS),
}
DECODERS = ("llama", "llama3", "mistral", "qwen2", "qwen3")
MIXTURES = ("mixtral", "qwen3_moe")
ENCODERS = ("bert", "roberta")
CLASSIFIERS = ("bert_classifier", "roberta_classifier")

Shape = tuple[int, ...]


def write_tiny(
    family: str,
    directory: str | Path,
    *,
    seed: int = 0,
    generation: dict[str, Any] | None = None,
    template: str = "",
    **overrides: Any,
) -> Path:
    """Write a model directory and return its path. ``generation``: further fields of generation_config.json;
    ``template``: what follows in the chat template."""
    config = {**FAMILIES[family], **overrides}
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tiny_state_dict(config, seed), path / "model.safetensors", {"format": "pt"})
    _write_tokenizer(path, config, template)
    if "num_key_value_heads" in config:
        own = {"bos_token_id": config["bos_token_id"], "eos_token_id": [config["eos_token_id"]]}
        (path / "generation_config.json").write_text(json.dumps({**own, **(generation or {})}))
    return path


def tiny_state_dict(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Seeded float32 weights under their Hugging Face names: fan-in scaled matrices, norms near one, small biases."""
    decoder = "num_key_value_heads" in config
    shapes = _decoder_shapes(config) if decoder else _encoder_shapes(config)
    return {name: _tensor(name, shape, seed) for name, shape in shapes}


# Sharp attention and strong branches: greedy tokens then depend on the whole context, not on the last token.
_SHARP = (
    "q_proj.weight",
    "k_proj.weight",
    "o_proj.weight",
    "down_proj.weight",
    "w2.weight",
    "query.weight",
    "key.weight",
)


def _tensor(name: str, shape: Shape, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}{shape}{seed}".encode()))
    noise = torch.randn(shape, generator=generator)
    if name.endswith(".bias"):
        return noise * 0.1
    if "norm" in name.lower():
        return 1 + noise * 0.1
    if "embed" in name:
        return noise * 0.3
    gain = 2.0 if name.endswith(_SHARP) else 1.0
    return noise * gain * shape[-1] ** -0.5


def _decoder_shapes(c: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    hidden, ffn, heads = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
    kv = c["num_key_value_heads"]
    dim = c.get("head_dim") or hidden // heads
    qwen2 = c["model_type"] == "qwen2"
    qkv_bias, o_bias = qwen2 or c.get("attention_bias", False), c.get("attention_bias", False)
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        attention = layer + "self_attn."
        for name, out, into, bias in (
            ("q_proj", heads * dim, hidden, qkv_bias),
            ("k_proj", kv * dim, hidden, qkv_bias),
            ("v_proj", kv * dim, hidden, qkv_bias),
            ("o_proj", hidden, heads * dim, o_bias),
        ):
            yield f"{attention}{name}.weight", (out, into)
            if bias:
                yield f"{attention}{name}.bias", (out,)
        if c["model_type"] in ("qwen3", "qwen3_moe"):
            yield attention + "q_norm.weight", (dim,)
            yield attention + "k_norm.weight", (dim,)
        experts = _expert_shapes(c, i, layer)
        yield from experts
        for name, out, into in (("gate_proj", ffn, hidden), ("up_proj", ffn, hidden), ("down_proj", hidden, ffn)):
            if experts:
                break
            yield f"{layer}mlp.{name}.weight", (out, into)
            if c.get("mlp_bias", False):
                yield f"{layer}mlp.{name}.bias", (out,)
        yield layer + "input_layernorm.weight", (hidden,)
        yield layer + "post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (c["vocab_size"], hidden)


def _expert_shapes(c: dict[str, Any], number: int, layer: str) -> list[tuple[str, Shape]]:
    """Each expert's own, as in files; none for a layer without experts."""
    hidden, mixtral = c["hidden_size"], c["model_type"] == "mixtral"
    count = c.get("num_local_experts") or c.get("num_experts", 0)
    if not count or number in c.get("mlp_only_layers", ()) or (number + 1) % c.get("decoder_sparse_step", 1):
        return []
    block, names = ("block_sparse_moe", "w1 w3 w2") if mixtral else ("mlp", "gate_proj up_proj down_proj")
    inner = c["intermediate_size"] if mixtral else c["moe_intermediate_size"]
    shapes = [(f"{layer}{block}.gate.weight", (count, hidden))]
    for expert in range(count):
        for name, shape in zip(names.split(), ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True):
            shapes.append((f"{layer}{block}.experts.{expert}.{name}.weight", shape))
    return shapes


def _encoder_shapes(c: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    hidden, ffn = c["hidden_size"], c["intermediate_size"]
    classifier = c["architectures"][0].endswith("ForSequenceClassification")
    roberta = c["model_type"] == "roberta"
    prefix = f"{c['model_type']}." if classifier else ""

    def linear(name: str, out: int, into: int) -> Iterator[tuple[str, Shape]]:
        yield name + ".weight", (out, into)
        yield name + ".bias", (out,)

    def norm(name: str) -> Iterator[tuple[str, Shape]]:
        yield name + ".weight", (hidden,)
        yield name + ".bias", (hidden,)

    yield f"{prefix}embeddings.word_embeddings.weight", (c["vocab_size"], hidden)
    yield f"{prefix}embeddings.position_embeddings.weight", (c["max_position_embeddings"], hidden)
    yield f"{prefix}embeddings.token_type_embeddings.weight", (c["type_vocab_size"], hidden)
    yield from norm(f"{prefix}embeddings.LayerNorm")
    for i in range(c["num_hidden_layers"]):
        layer = f"{prefix}encoder.layer.{i}."
        for name in ("query", "key", "value"):
            yield from linear(f"{layer}attention.self.{name}", hidden, hidden)
        yield from linear(f"{layer}attention.output.dense", hidden, hidden)
        yield from norm(f"{layer}attention.output.LayerNorm")
        yield from linear(f"{layer}intermediate.dense", ffn, hidden)
        yield from linear(f"{layer}output.dense", hidden, ffn)
        yield from norm(f"{layer}output.LayerNorm")
    labels = len(c.get("id2label", {})) or 2
    if classifier and roberta:
        yield from linear("classifier.dense", hidden, hidden)
        yield from linear("classifier.out_proj", labels, hidden)
    elif not roberta:
        yield from linear(f"{prefix}pooler.dense", hidden, hidden)
        if classifier:
            yield from linear("classifier", labels, hidden)


def _write_tokenizer(path: Path, config: dict[str, Any], template: str) -> None:
    decoder = "num_key_value_heads" in config
    special = SPECIAL_TOKENS
    if config["model_type"] == "roberta":
        special = (special[BOS], special[PAD], *special[2:])
    (path / "tokenizer.json").write_text(tokenizer_json(min(config["vocab_size"], VOCAB_SIZE), decoder, special))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL_TOKENS[PAD],
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "model_max_length": config["max_position_embeddings"],
    }
    if config["model_type"] == "bert":  # its second text has another type
        settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    if decoder:
        (path / "chat_template.jinja").write_text(CHAT_TEMPLATE + template)
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def write_tokenizer(path: Path, **settings: Any) -> None:
    """Write :func:`tokenizer_json` as the tokenizer of a model of whatever type."""
    (path / "tokenizer.json").write_text(tokenizer_json())
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings}))


@functools.lru_cache(maxsize=8)
def tokenizer_json(
    vocab_size: int = VOCAB_SIZE, decoder: bool = True, special_tokens: tuple[str, ...] = SPECIAL_TOKENS
) -> str:
    """A byte-level BPE trained on Python's own documentation: every byte string encodes and decodes exactly.

    A decoder's tokenizer adds ``<|begin|>`` in front, an encoder's adds ``<|end|>`` behind as well.
    Below 261 entries there is no room for the bytes: only ASCII is covered.
    """
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    text = [topics[name] for name in ("assert", "if", "while", "for", "try")]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + len(SPECIAL_TOKENS):
        alphabet = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    begin, end = SPECIAL_TOKENS[BOS], SPECIAL_TOKENS[EOS]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A" if decoder else f"{begin} $A {end}",
        special_tokens=[(t, special_tokens.index(t)) for t in (begin, end)],
    )
    return tokenizer.to_str()
