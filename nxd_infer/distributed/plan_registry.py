"""The plans of model types: transformers' own ``base_model_tp_plan`` where it has one, ours where it has none.

A program adds one with :func:`register_plan`, a package with an entry point, which every process then finds:

    [project.entry-points."nxd_infer.plans"]
    distilbert = "my_package:DISTILBERT"        # a ModelPlan
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from nxd_infer.distributed.model_plan import ModelPlan
from nxd_infer.errors import ModelConfigError
from nxd_infer.util.suggest import did_you_mean

_PROJECTIONS = {"q_proj": "q", "k_proj": "kv", "v_proj": "kv", "o_proj": "q"}
_TRANSFORMERS_STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "vocabulary",
    "replicated_with_grad_allreduce": "sum",
}

_ENDS = {"embed_tokens": "vocabulary", "lm_head": "logits"}
_DECODER = {
    "layers.*.self_attn": "attention",
    "layers.*.self_attn.q_norm": "sum",
    "layers.*.self_attn.k_norm": "sum",
    "layers.*.mlp": "shared",
    **_ENDS,
}
"""What transformers' plans of decoders leave out."""


def _attention(path: str, projections: str, out: str, heads: str = "q") -> dict[str, str]:
    """Return the styles of an attention module, and of its linear layers by their paths from it."""
    split = {f"{path}.{name}": f"column:{heads}" for name in projections.split()}
    return {path: "attention", **split, out: "row:q"}


_BERT = {
    **_attention("attention.self", "query key value", "attention.output.dense"),
    "layer.*.intermediate.dense": "column",
    "layer.*.output.dense": "row",
    "embeddings.word_embeddings": "vocabulary",
    "cls.predictions.decoder": "logits",
    "lm_head.decoder": "logits",
}
_GPT = {"h.*.mlp.c_fc": "column", "h.*.mlp.c_proj": "row", "wte": "vocabulary", "lm_head": "logits"}
_NO_CROSS_ATTENTION = {"add_cross_attention": "there is no plan for attention to an encoder's output"}


def _from_transformers(config: Any) -> dict[str, str]:
    """Read ``base_model_tp_plan``, and name the axes of heads in it."""
    found = {}
    for pattern, style in (config.base_model_tp_plan or {}).items():
        kind = _TRANSFORMERS_STYLES.get(style)
        if kind is None:
            raise ModelConfigError(
                f"{config.model_type}: base_model_tp_plan gives {pattern} the style {style!r}, which has no equivalent "
                f"here ({', '.join(_TRANSFORMERS_STYLES)} have); register a plan with register_plan()"
            )
        axis = _PROJECTIONS.get(pattern.rpartition(".")[2], "") if kind in ("column", "row") else ""
        found[pattern] = f"{kind}:{axis}" if axis else kind
    return found


READ = ("gemma2", "llama", "mistral", "qwen2", "qwen3")
"""Types whose plan is transformers' with what it leaves out."""

PLANS: dict[str, ModelPlan] = {
    "bert": ModelPlan(_BERT, ("encoder.layer",), refused=_NO_CROSS_ATTENTION),
    "roberta": ModelPlan(_BERT, ("encoder.layer",), refused=_NO_CROSS_ATTENTION),
    "gpt2": ModelPlan(
        {**_attention("h.*.attn", "c_attn", "h.*.attn.c_proj", "qkv"), **_GPT}, ("h",), refused=_NO_CROSS_ATTENTION
    ),
    "gpt_neo": ModelPlan(
        {**_attention("h.*.attn.attention", "q_proj k_proj v_proj", "h.*.attn.attention.out_proj"), **_GPT}, ("h",)
    ),
    "gpt_neox": ModelPlan(
        {
            **_attention("layers.*.attention", "query_key_value", "layers.*.attention.dense", "qkv_by_head"),
            "layers.*.mlp.dense_h_to_4h": "column",
            "layers.*.mlp.dense_4h_to_h": "row",
            "embed_in": "vocabulary",
            "embed_out": "logits",
            "lm_head": "logits",
        },
        ("layers",),
    ),
    "opt": ModelPlan(
        {
            **_attention("layers.*.self_attn", "q_proj k_proj v_proj", "layers.*.self_attn.out_proj"),
            "layers.*.fc1": "column",
            "layers.*.fc2": "row",
            **_ENDS,
        },
        ("decoder.layers",),
    ),
    "phi3": ModelPlan(
        {
            **_attention("layers.*.self_attn", "qkv_proj", "layers.*.self_attn.o_proj", "qkv"),
            "layers.*.mlp": "shared",
            "layers.*.mlp.gate_up_proj": "column:halves",
            "layers.*.mlp.down_proj": "row",
            **_ENDS,
        },
        ("layers",),
    ),
    "t5": ModelPlan(
        {
            **_attention("SelfAttention", "q k v", "SelfAttention.o"),
            **_attention("EncDecAttention", "q k v", "EncDecAttention.o"),
            "SelfAttention.relative_attention_bias": "head_bias",
            "DenseReluDense": "shared",
            "DenseReluDense.wi": "column",
            "DenseReluDense.wi_0": "column",
            "DenseReluDense.wi_1": "column",
            "DenseReluDense.wo": "row",
            "shared": "vocabulary",
            **_ENDS,
        },
        ("encoder.block", "decoder.block"),
    ),
}
"""Types whose plan is ours."""

_REGISTERED: dict[str, ModelPlan] = {}


def register_plan(model_type: str, plan: ModelPlan) -> None:
    """Make ``plan`` the plan of a model type, also of one that has one already."""
    _REGISTERED[model_type] = plan


def supported_types() -> list[str]:
    """Return the model types that have a plan, in alphabetical order."""
    return sorted({*READ, *PLANS, *_REGISTERED, *_points()})


GROUP = "nxd_infer.plans"


def _points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


@functools.cache
def _of_package(point: EntryPoint) -> ModelPlan:
    try:
        plan = point.load()
    except Exception as error:
        raise ModelConfigError(
            f"the plan of {point.name!r} is {point.value}, which cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(plan, ModelPlan):
        raise ModelConfigError(f"the plan of {point.name!r} is {point.value}: expected a ModelPlan, got {plan!r}")
    return plan


def plan_of_type(kind: str, config: Any = None) -> ModelPlan:
    """Return the plan of a supported model type; ``config``: of that type, for plans that are read from it."""
    plan = _REGISTERED.get(kind)
    if plan is None and (point := _points().get(kind)) is not None:
        plan = _of_package(point)
    plan = plan or PLANS.get(kind)
    if plan is None:
        styles = {} if config is None else _from_transformers(config)
        plan = ModelPlan({**styles, **_DECODER}, ("layers",))
    return plan


def unknown_type(kind: str) -> ModelConfigError:
    known = supported_types()
    return ModelConfigError(
        f"there is no tensor-parallel plan for model_type {kind!r}{did_you_mean(str(kind), known)}; there are plans "
        f"for {', '.join(known)}, and nxd_infer.distributed.register_plan() adds one (docs/transformers.md)"
    )


def plan_for(config: Any) -> ModelPlan:
    """Return the plan of a transformers configuration.

    Raises ModelConfigError with the supported types if its ``model_type`` has none, and if the configuration has
    something that its plan does not hold for.
    """
    if config.model_type not in supported_types():
        raise unknown_type(config.model_type)
    plan = plan_of_type(config.model_type, config)
    plan.check(config)
    return plan
