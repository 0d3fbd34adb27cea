"""The BERT family's entries in the registry. RoBERTa numbers its positions differently and has its own classifier."""

from __future__ import annotations

from nxd_models.bert.config import read_config
from nxd_models.bert.heads import BertClassifier, RobertaClassifier, SentenceEncoder
from nxd_models.bert.model import tensor_parallel_plan
from nxd_models.serving.encoder_step import ClassifyStep, EmbedStep
from nxd_models.spec import ModelSpec, Task

CLASSIFIES = "ForSequenceClassification"


class SentenceStep(EmbedStep, SentenceEncoder):
    """An encoder with pooling, as traced."""

    nxd_equal_ranks = True


class BertClassifyStep(ClassifyStep, BertClassifier):
    """BERT's classifier, as traced."""

    nxd_equal_ranks = True


class RobertaClassifyStep(ClassifyStep, RobertaClassifier):
    """RoBERTa's classifier, as traced."""

    nxd_equal_ranks = True


_EMBED = Task(SentenceEncoder, SentenceStep, blocks="encoder.layer")

BERT = ModelSpec(
    model_types=("bert",),
    read_config=read_config,
    tasks={
        "classify": Task(BertClassifier, BertClassifyStep, "bert.encoder.layer", CLASSIFIES),
        "embed": _EMBED,
    },
    tensor_parallel_plan=tensor_parallel_plan,
)
ROBERTA = ModelSpec(
    model_types=("roberta",),
    read_config=read_config,
    tasks={
        "classify": Task(RobertaClassifier, RobertaClassifyStep, "roberta.encoder.layer", CLASSIFIES),
        "embed": _EMBED,
    },
    tensor_parallel_plan=tensor_parallel_plan,
)
