"""Small models of every supported type, from random configurations, with a batch for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 61
SEQUENCE = 16


@dataclass(frozen=True)
class Case:
    """A model of a type: with ``heads`` query and ``kv`` key/value heads, and its own ``fields``."""

    kind: str
    heads: int = 4
    kv: int = 4
    fields: dict[str, Any] = field(default_factory=dict)
    head: str = "AutoModelForCausalLM"

    @property
    def name(self) -> str:
        more = "".join(f" {k}={v}" for k, v in self.fields.items() if k in ("tie_word_embeddings", "feed_forward_proj"))
        return f"{self.kind} {self.heads}/{self.kv}{more}"

    def config(self) -> Any:
        import transformers

        width = 8 * self.heads
        common = {
            "vocab_size": VOCABULARY,
            "hidden_size": width,
            "intermediate_size": 30,
            "num_hidden_layers": 2,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv,
            "max_position_embeddings": 64,
            "pad_token_id": 1,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "use_cache": False,
            "initializer_range": 0.1,
        }
        own = {"t5": _t5, "gpt2": _gpt2, "gpt_neo": _gpt_neo, "opt": _opt}.get(self.kind)
        fields = own(self.heads) if own else common
        dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "hidden_dropout"), 0.0)
        dropout |= dict.fromkeys(("attention_dropout", "dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        dropout |= dict.fromkeys(("embed_dropout", "resid_dropout", "dropout_rate"), 0.0)
        return transformers.AutoConfig.for_model(self.kind, **{**dropout, **fields, **self.fields})

    def build(self) -> nn.Module:
        """The model with every weight away from its initial value, the same at every call."""
        import transformers

        torch.manual_seed(0)
        config = self.config()
        config._attn_implementation = "eager"
        kind = getattr(transformers, self.head)
        model = kind.from_config(config) if self.head.startswith("Auto") else kind(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.02)
        return model

    def batch(self, rows: int = 2) -> dict[str, Tensor]:
        ids = torch.randint(3, VOCABULARY, (rows, SEQUENCE), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(ids)
        mask[1:, SEQUENCE - 3 :] = 0
        labels = ids.masked_fill(mask == 0, -100)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _t5(heads: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "d_model": 24,
        "d_kv": 8,
        "d_ff": 30,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": heads,
        "decoder_start_token_id": 0,
        "use_cache": False,
    }


def _gpt2(heads: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "n_embd": 8 * heads,
        "n_head": heads,
        "n_layer": 2,
        "n_positions": 64,
        "n_inner": 30,
        "use_cache": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }


def _gpt_neo(heads: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 8 * heads,
        "num_heads": heads,
        "num_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
        "intermediate_size": 30,
        "max_position_embeddings": 64,
        "use_cache": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }


def _opt(heads: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 8 * heads,
        "word_embed_proj_dim": 8 * heads,
        "ffn_dim": 30,
        "num_attention_heads": heads,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
        "use_cache": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 1,
    }


TIED, LOOSE = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
MASKED = "AutoModelForMaskedLM"
CASES = [
    Case("llama", 4, 2, LOOSE),
    Case("llama", 3, 1, TIED),
    Case("mistral", 4, 1),
    Case("qwen2", 6, 2),
    Case("qwen3", 6, 3, {"head_dim": 8}),
    Case("phi3", 4, 2),
    Case("phi3", 6, 3),
    Case("gemma2", 4, 2, {"head_dim": 8, "query_pre_attn_scalar": 8}),
    Case("bert", head=MASKED),
    Case("bert", 3, 3, head=MASKED),
    Case("roberta", head=MASKED),
    Case("gpt2"),
    Case("gpt2", 3, 3),
    Case("gpt_neo"),
    Case("gpt_neo", 3, 3),
    Case("gpt_neox", 4, 4, {"rotary_pct": 0.5}),
    Case("gpt_neox", 3, 3, {"rotary_pct": 0.5}),
    Case("opt"),
    Case("opt", 3, 3),
    Case("t5", head="T5ForConditionalGeneration"),
    Case("t5", 3, 3, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, "T5ForConditionalGeneration"),
]
