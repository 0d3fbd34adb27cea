"""Encoders and classifiers of transformers as our steps take them.

Shapes: B rows, S positions, E hidden size, C labels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nxd_models.generic.build import adopt, parallel_model
from nxd_models.generic.config import GenericEncoderConfig
from nxd_models.serving.encoder_step import ClassifyStep, EmbedStep
from nxd_models.serving.pooling import SentencePooling


class _Model(nn.Module):
    """A model of transformers whose modules are this one's, under their names."""

    kind = ""
    """Its class in transformers."""

    def __init__(self, config: GenericEncoderConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        model = parallel_model(self.kind, config.raw, dtype, add_pooling_layer=self.kind != "AutoModel")
        adopt(self, model)
        self.parts = (model,)  # in a tuple, because its modules are registered already

    def run(self, input_ids: Tensor, attention_mask: Tensor | None, token_type_ids: Tensor | None) -> Any:
        # Models without a table of types may still take types, and mean something else by them.
        types = {"token_type_ids": token_type_ids} if "type_vocab_size" in self.parts[0].config.to_dict() else {}
        return self.parts[0](input_ids=input_ids, attention_mask=attention_mask, return_dict=True, **types)


class HiddenStates(_Model):
    """A model that returns the vectors of all tokens [B, S, E]."""

    kind = "AutoModel"

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        return self.run(input_ids, attention_mask, token_type_ids)[0]


class SentenceEncoder(SentencePooling, HiddenStates):
    """A model that returns one vector per text."""


class Classifier(_Model):
    """A model with the head of sequence classification."""

    kind = "AutoModelForSequenceClassification"

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Map ids [B, S] to logits, float32 [B, C]."""
        return self.run(input_ids, attention_mask, token_type_ids).logits.float()


class GenericEmbedStep(EmbedStep, SentenceEncoder):
    """An encoder of transformers with pooling, as traced."""

    nxd_equal_ranks = True


class GenericClassifyStep(ClassifyStep, Classifier):
    """A classifier of transformers, as traced."""

    nxd_equal_ranks = True
