"""What a recipe would do, without doing it: parameters, memory per rank, tokens per step, time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nxd_infer.context import make_context, use_context
from nxd_infer.modules.lora import LoRAModel
from nxd_infer.pipeline.options import PipelineOptions
from nxd_infer.pipeline.partition import describe_partition
from nxd_infer.pipeline.pipeline import cuts_of
from nxd_infer.recipes.models import (
    Dtypes,
    build,
    dtypes,
    lora_config,
    naming_targets,
    obstacles,
    pipeline_options,
    raw_config,
)
from nxd_infer.recipes.recipe import Loaded
from nxd_infer.recipes.schema import Peft, Recipe

CHIPS = {"trn1": ("a NeuronCore of Trainium 1", 95e12), "trn2": ("a logical NeuronCore of Trainium 2", 167e12)}
"""Products per second of a device in bfloat16, times two: AWS's figure for a chip over its cores."""
UTILIZATION = 0.4
"""The share of this speed that training is assumed to reach."""


@dataclass(frozen=True)
class Plan:
    """Figures of a job. Bytes are those of the rank that has most."""

    parameters: int
    trained: int
    world: int
    degrees: dict[str, int]
    weights: float
    gradients: float
    optimizer: float
    activations: float
    """An estimate: by the formula of Korthikanti et al., "Reducing Activation Recomputation"."""
    rows: int
    tokens: int
    """Tokens per step."""
    microbatches: int
    steps: int | None
    flops: float
    """Per step of full rows, over all ranks; layers that are computed again count twice."""
    device: str
    peak: float
    obstacles: list[str]

    @property
    def memory(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def seconds(self) -> float:
        """Estimated seconds per step."""
        return self.flops / (self.peak * UTILIZATION * self.world)


def plan_of(loaded: Loaded, chip: str | None = None, cpu_peak: float = 0.0) -> Plan:
    """Return the figures of a recipe. Nothing is allocated: the model is built on the meta device.

    ``chip``: one of :data:`CHIPS`; None: this machine's processor, whose speed is ``cpu_peak``.
    """
    recipe = loaded.recipe
    raw = raw_config(loaded)
    kinds = dtypes(recipe, here=chip is None)
    strategy = recipe.distributed_strategy
    tp, pp, dp = strategy.tensor_model_parallel_size, strategy.pipeline_model_parallel_size, recipe.data_parallel_size
    ep = strategy.expert_model_parallel_size
    peft = recipe.model_alignment_strategy.peft
    moe = recipe.model.moe
    if moe is not None or any("swiglu" in text or "rmsnorm" in text for text in obstacles(loaded)):
        experts = 1 if moe is None else moe.num_experts
        total = trained = _formula(recipe, raw, experts)
        here = here_trained = _formula(recipe, raw, experts / ep) / (tp * pp)
        replica = total / (tp * pp)
        active = _formula(recipe, raw, 1 if moe is None else moe.top_k)
    else:
        with naming_targets(loaded):
            total, trained, _ = _counted(recipe, raw, peft)
            stages = _counted(recipe, raw, peft, tp, pp)[2]
            replica = max(stages)[1]
            here, here_trained = max(stages if ep == 1 else _counted(recipe, raw, peft, tp, pp, ep)[2])
        active = total
    width = kinds.weights.itemsize
    grad = 4 if kinds.fp32_grad_acc else width
    # With ZeRO-1 all data-parallel ranks share the state of one replica, whose experts they share anyhow.
    state = (8 + (4 if kinds.master_weights else 0)) * (replica / dp if strategy.zero1 else here_trained)
    length, rows = recipe.seq_length, recipe.data.global_batch_size
    pairs = 2 if recipe.model_alignment_strategy.pairs is not None else 1
    passes = 2 if recipe.model.activations_checkpoint_granularity == "full" else 1
    flops = model_flops(raw, active, trained, pairs * rows * length, pairs * rows * length**2, passes)
    name, peak = ("this machine's processor", cpu_peak) if chip is None else CHIPS[chip]
    steps = recipe.trainer.max_steps if recipe.trainer.max_steps > 0 else None
    return Plan(
        parameters=int(total),
        trained=int(trained),
        world=recipe.world_size,
        degrees={"tp": tp, "pp": pp, "cp": strategy.context_parallel_size, "dp": dp},
        weights=here * width,
        gradients=here_trained * grad,
        optimizer=state,
        activations=pairs * _activations(recipe, raw, kinds),
        rows=rows,
        tokens=pairs * rows * length,
        microbatches=recipe.microbatches,
        steps=steps,
        flops=flops,
        device=name,
        peak=peak,
        obstacles=obstacles(loaded),
    )


def model_flops(
    raw: Mapping[str, Any], parameters: float, trained: float, tokens: float, squares: float, passes: float = 1
) -> float:
    """Return the operations that a model needs for ``tokens``: forward, gradients of activations, and of weights.

    A token meets ``parameters``, of which ``trained`` have gradients. ``squares``: the sum of the squared lengths of
    the documents, inside which attention is causal. ``passes``: how often the forward pass is computed.
    """
    embedding = 0 if raw.get("tie_word_embeddings") else raw["vocab_size"] * raw["hidden_size"]
    heads = raw["num_attention_heads"]
    width = heads * (raw.get("head_dim") or raw["hidden_size"] // heads)
    matrices = parameters - embedding
    attention = 2 * raw["num_hidden_layers"] * width * squares
    return (passes + 1) * 2 * matrices * tokens + 2 * min(trained, matrices) * tokens + (passes + 2) * attention


def _counted(
    recipe: Recipe, raw: Mapping[str, Any], peft: Peft | None, tp: int = 1, pp: int = 1, ep: int = 1
) -> tuple[int, int, list[tuple[int, int]]]:
    """Return parameters, trained ones, and both for each pipeline rank, of the model of the first tensor rank."""
    with use_context(make_context(tp * pp * ep, 0, tp=tp, pp=pp, ep=ep)), torch.device("meta"):
        model = build(raw)
        options = PipelineOptions(pipeline_options(recipe))
        cuts = cuts_of(model, options, pp) if pp > 1 else []
        whole = model if peft is None else LoRAModel(model, lora_config(peft))
        if isinstance(whole, LoRAModel):
            whole.require_mergeable()
    chunks = recipe.distributed_strategy.virtual_pipeline_model_parallel_size
    found = [[0, 0] for _ in range(pp)]
    width = next(model.parameters()).element_size()
    trained = sum(param.numel() for param in whole.parameters() if param.requires_grad)
    total = sum(param.numel() for param in whole.parameters())
    for number, stage in enumerate(describe_partition(model, cuts)):
        share = stage.bytes // width
        found[number % pp][0] += share
        found[number % pp][1] += share if peft is None else trained // max(1, pp * chunks)
    return total, trained, [(one, two) for one, two in found]


def _formula(recipe: Recipe, raw: Mapping[str, Any], experts: float) -> float:
    """Parameters of a decoder that is not built here, with so many experts in each layer."""
    model = recipe.model
    hidden, inner, layers = raw["hidden_size"], raw["intermediate_size"], raw["num_hidden_layers"]
    heads = raw["num_attention_heads"]
    width = raw.get("head_dim") or hidden // heads
    groups = raw.get("num_key_value_heads") or heads
    attention = hidden * width * (2 * heads + 2 * groups)
    matrices = 3 if model.activation in (None, "swiglu", "fast-swiglu", "silu", "geglu", "reglu") else 2
    router = hidden * model.moe.num_experts if model.moe is not None else 0
    embedding = raw["vocab_size"] * hidden * (1 if raw.get("tie_word_embeddings") else 2)
    return layers * (attention + matrices * hidden * inner * experts + router + 2 * hidden) + embedding + hidden


def _activations(recipe: Recipe, raw: Mapping[str, Any], kinds: Dtypes) -> float:
    """Bytes of activations on the first pipeline rank."""
    strategy, rows, length = recipe.distributed_strategy, recipe.data.micro_batch_size, recipe.seq_length
    hidden, layers = raw["hidden_size"], raw["num_hidden_layers"]
    tp, pp = strategy.tensor_model_parallel_size, strategy.pipeline_model_parallel_size
    scale = kinds.products.itemsize / 2
    mine = layers / pp
    whole = rows * length * hidden * scale
    granularity = recipe.model.activations_checkpoint_granularity
    split = tp if strategy.sequence_parallel else 1
    if granularity == "full":
        layer = 2 * whole / split + 34 * whole / tp / mine  # one layer is recomputed at a time
    else:
        layer = 10 * whole / split + (16 if granularity == "selective" else 24) * whole / tp
    in_flight = min(pp, recipe.microbatches) if pp > 1 else 1
    logits = 2 * rows * length * raw["vocab_size"] * 4 / tp if pp == 1 else 0
    return layer * mine * in_flight + logits
