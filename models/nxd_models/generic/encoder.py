"""Encoders, and models with a head that answers at once, of transformers as our steps take them.

Shapes: B rows, S positions, E hidden size, C labels, V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from nxd_models.generic.build import adopt, parallel_model
from nxd_models.generic.config import GenericEncoderConfig
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
        model = self.parts[0]
        # Models without a table of types may still take types, and mean something else by them.
        types = getattr(model.config, "type_vocab_size", 0) and token_type_ids is not None
        known = inspect.signature(model.forward).parameters
        more = {"token_type_ids": token_type_ids} if types and "token_type_ids" in known else {}
        more |= {"use_cache": False} if "use_cache" in known else {}
        return model(input_ids=input_ids, attention_mask=attention_mask, return_dict=True, **more)


class HiddenStates(_Model):
    """A model that returns the vectors of all tokens [B, S, E]."""

    kind = "AutoModel"

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        return self.run(input_ids, attention_mask, token_type_ids)[0]


class SentenceEncoder(SentencePooling, HiddenStates):
    """A model that returns one vector per text."""


class _Logits(_Model):
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Map ids [B, S] to the head's logits, float32."""
        return self.run(input_ids, attention_mask, token_type_ids).logits.float()


class Classifier(_Logits):
    """A model with the head of sequence classification: [B, C]."""

    kind = "AutoModelForSequenceClassification"


class TokenClassifier(_Logits):
    """A model with the head of token classification: [B, S, C]."""

    kind = "AutoModelForTokenClassification"


class MaskedLM(_Logits):
    """A masked language model: [B, S, V]."""

    kind = "AutoModelForMaskedLM"


class Answerer(_Model):
    """A model with the head of question answering: the logits of an answer's begin and end, float32 [B, S, 2]."""

    kind = "AutoModelForQuestionAnswering"

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        found = self.run(input_ids, attention_mask, token_type_ids)
        return torch.stack([found.start_logits, found.end_logits], -1).float()
