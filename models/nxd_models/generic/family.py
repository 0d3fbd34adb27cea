"""The entries of the registry for model types without a family of ours."""

from __future__ import annotations

from nxd_infer.distributed import plans
from nxd_models.generic.config import CLASSIFIES, GENERATES, read_config
from nxd_models.generic.decoder import CausalLM, CausalLMStep
from nxd_models.hf.stored import StoredWeight
from nxd_models.spec import TRANSFORMERS, ModelSpec, Task

_RENAMED = {
    "lm_head.weight": StoredWeight("embed_out.weight"),
    "embed_out.weight": StoredWeight("lm_head.weight"),
}
"""GPT-NeoX's output layer, before and since transformers 5."""


def model_types() -> list[str]:
    """Return the model types that have a tensor-parallel plan."""
    return plans.supported_types()


def family_of(model_type: str) -> ModelSpec:
    """Return the family of one model type that has a plan."""
    return ModelSpec(
        model_types=(model_type,),
        read_config=read_config,
        tasks={"generate": Task(CausalLM, CausalLMStep, blocks="", architecture=GENERATES)},
        stored_weights=_RENAMED,
        model_impl=TRANSFORMERS,
    )
