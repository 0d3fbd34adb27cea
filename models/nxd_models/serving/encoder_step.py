"""The traced module of an encoder: one call, from ids to embeddings or logits.

class SentenceStep(EmbedStep, SentenceEncoder): ...
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from nxd_models.spec import EncoderConfig


class EncoderStep(nn.Module):
    """Mixin for a module that takes ids, mask and types, and has the ``config`` it was built from as
    ``Module(config, dtype, **options)``. Names its output, and declares how a call may be padded.

    Rows and positions are padded: ids with the padding token, mask and types with 0. Other rows and padding do not
    influence a row, because the mask hides them.
    """

    nxd_output = ""
    config: EncoderConfig

    @property
    def nxd_inputs(self) -> dict[str, dict[str, Any]]:
        pad = self.config.pad_token_id
        declared: dict[str, dict[str, Any]] = {
            "input_ids": {"role": "tokens", "pad": {0: pad, 1: pad}, "maximum": self.config.vocab_size - 1},
            "attention_mask": {"role": "mask", "pad": {0: 0, 1: 0}, "maximum": 1},
            "token_type_ids": {
                "role": "types",
                "pad": {0: 0, 1: 0},
                "default": 0,
                "maximum": self.config.type_vocab_size - 1,
            },
        }
        return {name: {"minimum": 0, **entry} for name, entry in declared.items()}

    @property
    def nxd_outputs(self) -> dict[str, dict[str, Any]]:
        return {self.nxd_output: {"role": self.nxd_output, "cut": {0: ("input_ids", 0)}}}

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> dict[str, Tensor]:
        """int64 [B, S] each -> ``{"embedding": float32 [B, E]}`` or ``{"logits": float32 [B, C]}``."""
        return {self.nxd_output: super().forward(input_ids, attention_mask, token_type_ids)}


class EmbedStep(EncoderStep):
    """For a module that returns float32 [B, E]."""

    nxd_output = "embedding"


class ClassifyStep(EncoderStep):
    """For a module that returns float32 [B, C]."""

    nxd_output = "logits"
