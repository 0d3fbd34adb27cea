"""The entries of the registry for model types without a family of ours."""

from __future__ import annotations

from nxd_infer.distributed import plan_registry
from nxd_infer.distributed.lazy import RENAMED
from nxd_models.generic.config import CLASSIFIES, GENERATES, read_config
from nxd_models.generic.decoder import CausalLM, CausalLMStep
from nxd_models.generic.encoder import Classifier, GenericClassifyStep, GenericEmbedStep, SentenceEncoder
from nxd_models.generic.whole_texts import WholeTexts
from nxd_models.spec import TRANSFORMERS, ModelSpec, Task

_NOT_SERVED = ("t5",)
"""Types whose plan is for training: encoder-decoder models have no step in transformers' own module."""


def model_types() -> list[str]:
    """Return the model types that have a tensor-parallel plan and a step."""
    return [name for name in plan_registry.supported_types() if name not in _NOT_SERVED]


def family_of(model_type: str) -> ModelSpec | None:
    """Return the family of one model type; None if it has no plan."""
    if model_type not in plan_registry.supported_types():
        return None
    blocks = next(iter(plan_registry.plan_of_type(model_type).stacks), "")
    return ModelSpec(
        model_types=(model_type,),
        read_config=read_config,
        tasks={
            "generate": Task(CausalLM, CausalLMStep, blocks, GENERATES, WholeTexts),
            "classify": Task(Classifier, GenericClassifyStep, blocks, CLASSIFIES),
            "embed": Task(SentenceEncoder, GenericEmbedStep, blocks),
        },
        stored_weights=RENAMED,
        model_impl=TRANSFORMERS,
    )
