"""``config.json`` of Llama 2 and 3, Mistral, Qwen2 and Qwen3, and of the mixtures of experts among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nxd_infer.errors import ModelConfigError
from nxd_models.hf.config_file import (
    Count,
    Flag,
    Fraction,
    ModelFile,
    Numbers,
    Positive,
    SpecialTokens,
    Texts,
    TokenId,
)
from nxd_models.layers import Activation
from nxd_models.rope import RopeConfig, RopeFile
from nxd_models.spec import DecoderConfig


@dataclass(frozen=True)
class Mixture:
    """Feed-forward blocks of experts, of which a router chooses some for every token."""

    experts: int
    chosen: int
    """Experts of a token."""
    intermediate_size: int
    """Of each expert."""
    normalised: bool
    """The weights of a token's experts are divided by their sum."""
    dense_layers: tuple[int, ...] = ()
    """Layers with one feed-forward block for all tokens."""
    balance: float = 0.0
    """Factor of the load balancing loss that training adds."""


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """A causal language model of the Llama family."""

    intermediate_size: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    norm_eps: float = 1e-6
    activation: str = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm over each query and key head (Qwen3)."""
    tied: bool = False
    """The output head is the transposed embedding."""
    padding_idx: int | None = None
    """The row of the embedding that learns nothing from its lookups."""
    sliding_window: int | None = None
    """Up to this length full attention computes the same; longer contexts are rejected (see ``max_length``)."""
    initializer_range: float = 0.02
    mixture: Mixture | None = None

    def mixture_of(self, layer: int) -> Mixture | None:
        """The experts of a layer; None if it has one feed-forward block."""
        return None if self.mixture is None or layer in self.mixture.dense_layers else self.mixture

    @property
    def max_length(self) -> int:
        """The longest context in tokens that is computed exactly as in the original model."""
        longest = self.max_position
        if self.rope.type == "dynamic":
            longest = int(longest * self.rope.factor)
        return min(longest, self.sliding_window or longest)

    def check_length(self, length: int) -> None:
        """Raise ModelConfigError naming the field that limits the context if ``length`` exceeds it."""
        if length <= self.max_length:
            return
        if self.sliding_window and self.sliding_window < length:
            raise ModelConfigError(
                f"a context of {length} tokens is beyond sliding_window = {self.sliding_window}: sliding window "
                f"attention is not supported; use at most {self.max_length} tokens, where both compute the same"
            )
        raise ModelConfigError(
            f"a context of {length} tokens is beyond max_position_embeddings = {self.max_position}"
            f" (RoPE type {self.rope.type}); use at most {self.max_length} tokens"
        )

    @property
    def usual_length(self) -> int:
        return min(self.max_length, self.rope.original_max_position) if self.rope.type == "dynamic" else self.max_length

    def check_cached_length(self, max_len: int) -> None:
        super().check_cached_length(max_len)
        if max_len > self.usual_length:
            raise ModelConfigError(
                f"a context of {max_len} tokens is beyond the {self.usual_length} up to which dynamic rotary positions "
                "are not scaled: longer ones rotate each cached key by the length at which it was computed, so that an "
                f"answer would depend on how its prompt was cut; use max_len = {self.usual_length} at most"
            )


class LlamaFile(ModelFile, RopeFile, SpecialTokens):
    """The fields of ``config.json``. Dropout rates are ignored: these models are trained without dropout."""

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    max_position_embeddings: Count | None = None
    rms_norm_eps: Positive = 1e-6
    hidden_act: Activation = "silu"
    attention_bias: Flag = False
    mlp_bias: Flag = False
    tie_word_embeddings: Flag = False
    layer_types: Texts = ()
    sliding_window: Count | None = None
    use_sliding_window: Flag = False
    max_window_layers: TokenId = 28
    """The first layers, which see all tokens (Qwen)."""
    is_causal: Any = None
    rope_interleaved: Any = None
    initializer_range: Positive = 0.02
    pad_token_id: Any = None

    def config(self) -> LlamaConfig:
        mixture = self.mixture()
        self.refuse("rope_interleaved", "rotary positions of neighbouring elements are not supported in this family")
        self.require_causal()
        self.require_known()
        kind, hidden, heads = self.model_type, self.hidden_size, self.num_attention_heads
        kv_heads = self.num_key_value_heads or heads
        if heads % kv_heads:
            raise self.error("num_key_value_heads", f"does not divide the {heads} attention heads")
        if self.head_dim is None and hidden % heads:
            raise self.error("hidden_size", f"does not divide over {heads} heads, and head_dim is not given")
        # Qwen3's default head_dim is 128 whatever the hidden size; the others derive it.
        head_dim = self.head_dim or (128 if kind == "qwen3" else hidden // heads)
        if head_dim % 2:
            raise self.error("head_dim", "rotary embeddings need an even head dimension")
        max_position = self.max_position_embeddings or (32768 if kind.startswith("qwen") else 2048)
        attention_bias = self.attention_bias and kind in ("llama", "qwen3", "qwen3_moe")
        return LlamaConfig(
            model_type=kind,
            vocab_size=self.vocab_size,
            hidden_size=hidden,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position=max_position,
            rope=self.rope(max_position),
            norm_eps=self.rms_norm_eps,
            activation=self.hidden_act,
            qkv_bias=attention_bias or kind == "qwen2",
            output_bias=attention_bias,
            mlp_bias=self.mlp_bias and kind == "llama",
            qk_norm=kind.startswith("qwen3"),
            tied=self.tie_word_embeddings,
            padding_idx=self._padding(),
            sliding_window=self._window(),
            initializer_range=self.initializer_range,
            bos_token_id=self.bos,
            eos_token_ids=self.eos,
            dtype=self.weight_dtype,
            mixture=mixture,
        )

    def mixture(self) -> Mixture | None:
        for name in ("num_local_experts", "num_experts", "n_routed_experts"):
            self.refuse(name, "this model type has no mixture of experts")
        return None

    def _padding(self) -> int | None:
        """Return the id of padding if it is a row of the embedding; in some checkpoints it is one too many."""
        value = self.pad_token_id
        return value if type(value) is int and -self.vocab_size <= value < self.vocab_size else None

    def _window(self) -> int | None:
        if "chunked_attention" in self.layer_types or "linear_attention" in self.layer_types:
            raise self.error("layer_types", "only full attention is supported")
        if self.layer_types and "sliding_attention" not in self.layer_types:
            return None
        if self.model_type.startswith("qwen"):
            windowed = self.use_sliding_window and (self.layer_types or self.max_window_layers < self.num_hidden_layers)
            return (self.sliding_window or 4096) if windowed else None
        if self.model_type == "mistral" and "sliding_window" not in self._raw:
            return 4096  # the reference's default for an absent field; null disables the window
        return self.sliding_window


class MixtureFile(LlamaFile):
    """What models with experts have besides."""

    num_experts_per_tok: Count
    output_router_logits: Flag = False
    """Training adds a load balancing loss."""
    router_aux_loss_coef: Fraction = 0.001

    def _mixture(self, experts: int, inner: int, normalised: bool, dense: Iterable[int] = ()) -> Mixture:
        for name in ("num_key_value_heads", "max_position_embeddings"):
            if getattr(self, name) is None:  # transformers' default depends on the model type
                raise self.error(name, "the field is missing")
        if self.num_experts_per_tok > experts:
            raise self.error("num_experts_per_tok", f"there are {experts} experts")
        balance = self.router_aux_loss_coef if self.output_router_logits else 0.0
        return Mixture(experts, self.num_experts_per_tok, inner, normalised, tuple(dense), balance)


class MixtralFile(MixtureFile):
    rope_theta: Positive = 1e6
    rms_norm_eps: Positive = 1e-5
    num_local_experts: Count
    router_jitter_noise: Any = None

    def mixture(self) -> Mixture:
        self.refuse("router_jitter_noise", "noise at the router is not supported in this family")
        return self._mixture(self.num_local_experts, self.intermediate_size, normalised=True)


class Qwen3MoeFile(MixtureFile):
    num_experts: Count | None = None
    num_local_experts: Count | None = None
    """What transformers 5 writes for ``num_experts``."""
    moe_intermediate_size: Count
    norm_topk_prob: Flag = False
    decoder_sparse_step: Count = 1
    mlp_only_layers: Numbers = ()

    def mixture(self) -> Mixture:
        experts = self.num_experts or self.num_local_experts
        if experts is None:
            raise self.error("num_experts", "the number of experts is missing")
        dense = (
            layer
            for layer in range(self.num_hidden_layers)
            if layer in self.mlp_only_layers or (layer + 1) % self.decoder_sparse_step
        )
        return self._mixture(experts, self.moe_intermediate_size, self.norm_topk_prob, dense)

    def _window(self) -> int | None:
        return (self.sliding_window or 4096) if self.use_sliding_window else None


FILES = {"mixtral": MixtralFile, "qwen3_moe": Qwen3MoeFile}


def read_config(raw: Mapping[str, Any], origin: str = "config.json") -> LlamaConfig:
    return FILES.get(str(raw.get("model_type")), LlamaFile).read(raw, origin).config()
