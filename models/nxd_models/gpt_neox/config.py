"""``config.json`` of GPT-NeoX, in the spellings of transformers 4 and 5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nxd_models.hf.config_file import Count, Flag, ModelFile, Positive, SpecialTokens
from nxd_models.layers import Activation
from nxd_models.rope import RopeConfig, RopeFile
from nxd_models.spec import DecoderConfig

DEFAULT_ROTARY = 0.25


@dataclass(frozen=True, kw_only=True)
class NeoXConfig(DecoderConfig):
    """A causal language model of the GPT-NeoX family."""

    intermediate_size: int
    rotary_size: int
    """The first elements of each head, which are rotated."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    norm_eps: float = 1e-5
    activation: str = "gelu"
    attention_bias: bool = True
    parallel_residual: bool = True
    """Attention and feed-forward read the same hidden state."""
    initializer_range: float = 0.02


class NeoXFile(ModelFile, RopeFile, SpecialTokens):
    """The fields of ``config.json``. Dropout rates are ignored."""

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    max_position_embeddings: Count = 2048
    layer_norm_eps: Positive = 1e-5
    hidden_act: Activation = "gelu"
    attention_bias: Flag = True
    use_parallel_residual: Flag = True
    initializer_range: Positive = 0.02
    rotary_pct: Positive = DEFAULT_ROTARY
    rotary_emb_base: Any = None
    num_key_value_heads: Any = None  # some files have it, with no effect
    is_causal: Any = None
    is_decoder: Any = None

    def config(self) -> NeoXConfig:
        self.refuse("tie_word_embeddings", "a head that is the embedding is not supported in this family")
        self.require_causal()
        self.require_known()
        hidden, heads = self.hidden_size, self.num_attention_heads
        if hidden % heads:
            raise self.error("hidden_size", f"does not divide over {heads} heads")
        head_dim = hidden // heads
        rotary = int(head_dim * self.rotary_pct)
        if self.rotary_pct > 1 or rotary < 2 or rotary % 2:
            raise self.error("rotary_pct", f"it rotates {rotary} of {head_dim} elements: expected an even number")
        rope = self.rope(self.max_position_embeddings)
        if rope.type == "dynamic":
            raise self.error("rope_scaling", "the RoPE type 'dynamic' is not supported in this family")
        return NeoXConfig(
            model_type=self.model_type,
            vocab_size=self.vocab_size,
            hidden_size=hidden,
            num_layers=self.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            max_position=self.max_position_embeddings,
            intermediate_size=self.intermediate_size,
            rotary_size=rotary,
            rope=rope,
            norm_eps=self.layer_norm_eps,
            activation=self.hidden_act,
            attention_bias=self.attention_bias,
            parallel_residual=self.use_parallel_residual,
            initializer_range=self.initializer_range,
            bos_token_id=self.bos,
            eos_token_ids=self.eos,
            dtype=self.weight_dtype,
        )


def read_config(raw: Mapping[str, Any], origin: str = "config.json") -> NeoXConfig:
    """transformers 4 says ``rotary_pct`` and ``rotary_emb_base``, 5 has both among ``rope_parameters``."""
    plain = {"rope_theta": raw.get("rotary_emb_base", raw.get("rope_theta"))}
    rope = raw.get("rope_parameters")
    if isinstance(rope, Mapping) and "partial_rotary_factor" in rope:
        plain["rotary_pct"] = rope["partial_rotary_factor"]
        plain["rope_parameters"] = {name: value for name, value in rope.items() if name != "partial_rotary_factor"}
    return NeoXFile.read({**raw, "partial_rotary_factor": None, **plain}, origin).config()
