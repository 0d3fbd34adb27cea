"""The entries of the registry for model types without a family of ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from nxd_infer.distributed import plan_registry
from nxd_infer.distributed.lazy import RENAMED
from nxd_infer.layout import WeightSource
from nxd_models.generic.build import weights
from nxd_models.generic.config import architectures_for, library
from nxd_models.generic.decoder import CausalLM, CausalLMStep
from nxd_models.generic.encoder import (
    Answerer,
    Classifier,
    MaskedLM,
    SentenceEncoder,
    TokenClassifier,
)
from nxd_models.generic.supported import read_config
from nxd_models.generic.uncached import UncachedLM, UncachedStep
from nxd_models.generic.whole_texts import WholeTexts
from nxd_models.serving.encoder_step import (
    AnswerStep,
    ClassifyStep,
    EmbedStep,
    FillMaskStep,
    TokenClassifyStep,
    traced,
)
from nxd_models.spec import TRANSFORMERS, ModelSpec, Task


def _causal(config: Any, *args: Any, **options: Any) -> nn.Module:
    return (UncachedLM if config.why_whole else CausalLM)(config, *args, **options)


def _causal_step(config: Any, *args: Any, **options: Any) -> nn.Module:
    return (UncachedStep if config.why_whole else CausalLMStep)(config, *args, **options)


_TASKS = {
    "generate": (_causal, _causal_step, "AutoModelForCausalLM", WholeTexts),
    "classify": (Classifier, traced(ClassifyStep, Classifier), Classifier.kind, None),
    "token-classification": (TokenClassifier, traced(TokenClassifyStep, TokenClassifier), TokenClassifier.kind, None),
    "question-answering": (Answerer, traced(AnswerStep, Answerer), Answerer.kind, None),
    "fill-mask": (MaskedLM, traced(FillMaskStep, MaskedLM), MaskedLM.kind, None),
}


def family_of(model_type: Any, embeds: bool = False) -> ModelSpec | None:
    """Return the family of one model type; None if transformers does not know it.

    ``embeds``: its directories are read as encoders, whatever their architecture.
    """
    known = library().models.auto
    if not isinstance(model_type, str) or model_type not in known.configuration_auto.CONFIG_MAPPING_NAMES:
        return None
    planned = model_type in plan_registry.supported_types()

    def read(head: str) -> Callable[[Path], WeightSource] | None:
        return None if planned else functools.partial(weights, head)

    blocks = next(iter(plan_registry.plan_of_type(model_type).stacks), "") if planned else ""
    return ModelSpec(
        model_types=(model_type,),
        read_config=functools.partial(read_config, embeds=embeds),
        tasks={
            **{
                name: Task(module, step, blocks, architectures, reference, read(head))
                for name, (module, step, head, reference) in _TASKS.items()
                if (architectures := architectures_for(name, model_type))
            },
            "embed": Task(SentenceEncoder, traced(EmbedStep, SentenceEncoder), blocks, weights=read("AutoModel")),
        },
        stored_weights=RENAMED,
        model_impl=TRANSFORMERS,
    )
