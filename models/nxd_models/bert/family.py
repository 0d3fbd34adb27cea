"""The BERT family's entries in the registry. RoBERTa numbers its positions differently and has its own classifier."""

from __future__ import annotations

from torch import nn

from nxd_models.bert.config import read_config
from nxd_models.bert.heads import BertClassifier, RobertaClassifier, SentenceEncoder
from nxd_models.bert.model import tensor_parallel_plan
from nxd_models.serving.encoder_step import ClassifyStep, EmbedStep, traced
from nxd_models.spec import ModelSpec, Task

CLASSIFIES = "ForSequenceClassification"


def _family(model_type: str, classifier: type[nn.Module]) -> ModelSpec:
    blocks = f"{model_type}.encoder.layer"
    return ModelSpec(
        model_types=(model_type,),
        read_config=read_config,
        tasks={
            "classify": Task(classifier, traced(ClassifyStep, classifier), blocks, CLASSIFIES),
            "embed": Task(SentenceEncoder, traced(EmbedStep, SentenceEncoder), blocks="encoder.layer"),
        },
        tensor_parallel_plan=tensor_parallel_plan,
    )


BERT, ROBERTA = _family("bert", BertClassifier), _family("roberta", RobertaClassifier)
