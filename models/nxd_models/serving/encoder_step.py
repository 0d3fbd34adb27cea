"""The traced module of an encoder: one call, from ids to embeddings or logits.

Task(SentenceEncoder, traced(EmbedStep, SentenceEncoder), blocks="encoder.layer")
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from nxd_models.serving.sampling import TOP_LOGPROBS
from nxd_models.spec import EncoderConfig


class EncoderStep(nn.Module):
    """Mixin for a module that takes ids, mask and types, and has the ``config`` it was built from as
    ``Module(config, dtype, **options)``. Names its output, and declares how a call may be padded.

    Rows and positions are padded: ids with the padding token, mask and types with 0. Other rows and padding do not
    influence a row, because the mask hides them.
    """

    output_names: tuple[str, ...] = ("logits",)
    cut_dimensions = 1
    """Leading dimensions of the outputs that are those of the ids."""
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
        cut = {dimension: ("input_ids", dimension) for dimension in range(self.cut_dimensions)}
        return {name: {"role": name, "cut": cut} for name in self.output_names}

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> dict[str, Tensor]:
        """Map int64 [B, S] each to the outputs by name."""
        return self.named(super().forward(input_ids, attention_mask, token_type_ids))

    def named(self, found: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.output_names, (found,), strict=True))


class EmbedStep(EncoderStep):
    """For a module that returns float32 [B, E]."""

    output_names = ("embedding",)


class ClassifyStep(EncoderStep):
    """For a module that returns float32 [B, C]."""


class TokenClassifyStep(EncoderStep):
    """For a module that returns float32 [B, S, C]."""

    cut_dimensions = 2


class AnswerStep(EncoderStep):
    """For a module that returns the logits of an answer's begin and end, float32 [B, S, 2]."""

    cut_dimensions = 2


class FillMaskStep(EncoderStep):
    """For a module that returns logits float32 [B, S, V], of which it keeps the likeliest tokens at each position:
    ``top_ids`` int64 and ``top_logprobs`` float32, [B, S, K] each."""

    output_names = ("top_ids", "top_logprobs")
    cut_dimensions = 2

    def named(self, found: Tensor) -> dict[str, Tensor]:
        top = found.log_softmax(-1).topk(min(TOP_LOGPROBS, found.shape[-1]))
        return {"top_ids": top.indices, "top_logprobs": top.values}


def traced(step: type[EncoderStep], module: type[nn.Module]) -> type[nn.Module]:
    """Return ``module`` as it is traced. All ranks have the same graph: our modules read the rank as data."""
    return type(f"{module.__name__}Step", (step, module), {"nxd_equal_ranks": True})
