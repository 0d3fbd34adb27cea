"""The keys of a recipe's section ``model``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nxd_infer.recipes.keys import key, section

KERNELS = "it chooses kernels of Trainium; the ones here compute the same"
OFF = "models are trained without it here"

RATES = (
    "LinearAnnealingWithWarmUp",
    "LinearAnnealing",
    "CosineAnnealing",
    "WarmupHoldPolicy",
    "WarmupAnnealing",
    "ConstantWithWarmUp",
)
OPTIMIZERS = ("adamw", "adamw_fp32OptState", "adam", "sgd", "adagrad", "rmsprop")


@dataclass(kw_only=True)
class Sched:
    name: str = key("LinearAnnealingWithWarmUp", "how the learning rate moves", choices=RATES)
    warmup_steps: int = key(0, "steps up to the full rate", int, minimum=0)
    warmup_ratio: float | None = key(
        None, "the share of all steps, in place of warmup_steps", float, minimum=0, maximum=1
    )
    constant_steps: int = key(0, "last steps, at min_lr", int, minimum=0)
    max_steps: int | None = key(None, "steps until min_lr; default: trainer.max_steps", int, minimum=-1)
    min_lr: float = key(0.0, "the least rate", float, minimum=0)


@dataclass(kw_only=True)
class Optim:
    name: str = key("adamw", "the optimizer; its state is float32 in any case with master weights", choices=OPTIMIZERS)
    lr: float = key(1e-4, "learning rate", float, minimum=0)
    weight_decay: float = key(0.01, "weight decay", float, minimum=0)
    betas: list[float] = key([0.9, 0.999], "decay of the two moments", list[float])
    eps: float = key(1e-8, "added to the root of the second moment", float, minimum=0)
    momentum: float = key(0.0, "of sgd and rmsprop", float, minimum=0)
    capturable: bool | None = key(None, "an option of CUDA graphs", bool, unused=KERNELS)
    sched: Sched | None = section(Sched, "the learning rate over the steps; without it: constant", optional=True)


@dataclass(kw_only=True)
class Fusions:
    softmax: bool | None = key(None, "fused softmax", bool, unused=KERNELS)
    flash_attention: bool | None = key(None, "flash attention", bool, unused=KERNELS)
    ring_attention: bool | None = key(None, "ring attention, for context_parallel_size above 1", bool, unused=KERNELS)
    mlp: bool | None = key(None, "fused MLP", bool, unused=KERNELS)
    do_transpose: bool | None = key(None, "transposed operands", bool, unused=KERNELS)


@dataclass(kw_only=True)
class Moe:
    num_experts: int = key(8, "experts per layer", int, minimum=1)
    top_k: int = key(2, "experts per token", int, minimum=1)
    frequency: int = key(1, "every n-th layer has experts", int, minimum=1)
    dropout: float = key(0.0, "dropout in experts", float, minimum=0, maximum=0.99)
    capacity_factor: float = key(
        0.0, "tokens an expert takes, over an equal share; 0.0 with dropless", float, minimum=0
    )
    dropless: bool = key(True, "experts take every token", bool)
    routing_algorithm: str = key("top_k", "how tokens find experts", choices=("top_k", "sinkhorn"))
    output_router_logits: bool = key(True, "give the router's scores to the loss", bool)
    router_aux_loss_coef: float = key(0.02, "weight of the loss that balances experts", float, minimum=0)
    normalize_top_k_affinities: bool = key(True, "scale the chosen experts' weights to 1", bool)
    router_activation: str = key("softmax", "activation of the router", choices=("softmax", "sigmoid"))
    sinkhorn_iterations: int = key(30, "rounds of the sinkhorn router", int, minimum=1)
    sinkhorn_tol: float | None = key(None, "when these rounds end", float, minimum=0)
    token_shuffle_group_size: int | None = key(None, "ranks among which tokens are shuffled", int, minimum=1)


@dataclass(kw_only=True)
class Model:
    model_config: str | None = key(
        None, "config.json of Hugging Face, or the directory that has it; other keys replace its fields"
    )
    encoder_seq_length: int | None = key(None, "tokens per row", int, minimum=2)
    seq_length: int | None = key(None, "as encoder_seq_length", int, minimum=2)
    max_position_embeddings: int | None = key(None, "longest context", int, minimum=2)
    num_layers: int | None = key(None, "layers", int, minimum=1)
    hidden_size: int | None = key(None, "width", int, minimum=1)
    ffn_hidden_size: int | None = key(None, "inner width of the MLP", int, minimum=1, also=("intermediate_size",))
    num_attention_heads: int | None = key(None, "attention heads", int, minimum=1)
    num_kv_heads: int | None = key(
        None, "key/value heads", int, minimum=1, also=("num_key_value_heads", "num_query_groups")
    )
    kv_channels: int | None = key(None, "width of a head", int, minimum=1, also=("head_dim",))
    vocab_size: int | None = key(None, "tokens; default: the tokenizer's, padded", int, minimum=1)
    make_vocab_size_divisible_by: int = key(
        8, "pad the vocabulary to a multiple of this and of the tensor-parallel degree", int, minimum=1
    )
    qkv_linear: bool | None = key(
        None,
        "one layer for queries, keys and values",
        bool,
        unused="queries, keys and values are sharded exactly without it",
    )
    fuse_qkv: bool | None = key(
        None,
        "one weight for queries, keys and values",
        bool,
        unused="queries, keys and values are sharded exactly without it",
    )
    rope_theta: float | None = key(None, "base of the rotary positions", float, minimum=1, also=("rotary_base",))
    rotary_percentage: float = key(1.0, "share of a head that rotates", float, unused=OFF, only=(1.0,))
    position_embedding_type: str = key("rope", "kind of positions", choices=("rope", "learned_absolute", "none"))
    normalization: str | None = key(
        None, "kind of norm", choices=("rmsnorm", "layernorm", "layernorm1p", "low_precision_layernorm")
    )
    layernorm_epsilon: float | None = key(
        None, "added to the variance in norms", float, minimum=0, also=("rms_norm_eps",)
    )
    activation: str | None = key(
        None,
        "activation of the MLP",
        choices=("swiglu", "fast-swiglu", "gelu", "geglu", "reglu", "squared-relu", "silu"),
    )
    has_bias: bool | None = key(None, "biases in linear layers", bool, also=("bias",))
    attention_bias: bool | None = key(None, "biases in attention", bool)
    share_embeddings_and_output_weights: bool | None = key(
        None, "tie the head to the embedding", bool, also=("tie_word_embeddings",)
    )
    transformer_block_type: str = key("pre_ln", "where the norms are", choices=("pre_ln", "post_ln", "normformer"))
    sliding_window_size: int | None = key(
        None, "positions that attention sees", int, minimum=1, also=("sliding_window",)
    )
    init_method_std: float | None = key(
        None, "standard deviation of new weights", float, minimum=0, also=("initializer_range",)
    )
    use_scaled_init_method: bool | None = key(None, "smaller new weights before a sum", bool, unused=OFF)
    hidden_dropout: float | None = key(
        None, "dropout of hidden states", float, minimum=0, maximum=0.99, also=("hidden_dropout_prob",), unused=OFF
    )
    attention_dropout: float | None = key(None, "dropout of attention", float, minimum=0, maximum=0.99, unused=OFF)
    ffn_dropout: float | None = key(None, "dropout of the MLP", float, minimum=0, maximum=0.99, unused=OFF)
    apply_query_key_layer_scaling: bool | None = key(None, "scale scores by the layer's number", bool, unused=KERNELS)
    persist_layer_norm: bool | None = key(None, "a kernel of norms", bool, unused=KERNELS)
    pre_process: bool | None = key(
        None, "the first stage has the embedding", bool, unused="stages follow from distributed_strategy"
    )
    post_process: bool | None = key(
        None, "the last stage has the head", bool, unused="stages follow from distributed_strategy"
    )
    use_cpu_initialization: bool | None = key(
        None, "new weights are made on the host", bool, unused="weights are made rank by rank, the same at any degree"
    )
    activations_checkpoint_granularity: str | None = key(
        None,
        "recompute layers in the backward pass: full, or their attention: selective",
        choices=("full", "selective"),
    )
    activations_checkpoint_recompute: list[str] = key(
        [], "parts of layers to recompute", list[str], unused="selective recomputes the attention"
    )
    activations_checkpoint_method: str | None = key(
        None, "how layers are chosen", choices=("uniform", "block"), unused="full recomputes every layer"
    )
    activations_checkpoint_num_layers: int | None = key(
        None, "layers per piece", int, unused="full recomputes every layer"
    )
    pipeline_cuts: list[str] = key([], "last layers of all stages but the last; default: balanced", list[str])
    weight_init_only: bool = key(
        False, "take the weights of exp_manager.resume_from_checkpoint, and not its optimizer", bool
    )
    transpose_nki_inputs: bool | None = key(None, "transposed operands", bool, unused=KERNELS)
    do_layer_norm_weight_decay: bool = key(False, "decay norms and biases, too", bool)
    flash_attention: bool | None = key(None, "as fusions.flash_attention", bool, unused=KERNELS)
    fusions: Fusions = section(Fusions, "kernels")
    moe: Moe | None = section(Moe, "mixture of experts", optional=True)
    optim: Optim = section(Optim, "the optimizer")
    extra: dict[str, Any] = key({}, "ours: further fields of config.json", dict)
