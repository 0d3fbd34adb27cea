"""What a generation step should compute, by transformers' own code alone: the reference of ``nxd-infer verify``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nxd_models.generic.build import adopt, parallel_model
from nxd_models.generic.config import GenericDecoderConfig
from nxd_models.serving.sampling import sample


class WholeTexts(nn.Module):
    """Called like a :class:`~nxd_models.serving.decoder_step.DecoderStep`, without its settings of sampling: greedy.

    It keeps the texts of the slots instead of keys and values, and computes each anew: neither our cache and attention
    nor, at degree 1, the plan has a part in it.
    """

    def __init__(
        self, config: GenericDecoderConfig, dtype: torch.dtype = torch.float32, *, draft_tokens: int = 0, **_: Any
    ):
        super().__init__()
        model = parallel_model("AutoModelForCausalLM", config.raw, dtype)
        adopt(self, model)
        self.parts = (model,)  # in a tuple, because its modules are registered already
        self.draft_tokens = draft_tokens
        self.texts: dict[int, list[int]] = {}

    def forward(
        self, tokens: Tensor, start: Tensor, length: Tensor, block_table: Tensor, **_: Any
    ) -> dict[str, Tensor]:
        """Return the outputs of a step, those of idle rows included, which mean nothing."""
        verifies = self.draft_tokens > 0 and tokens.shape[1] == self.draft_tokens + 1
        samples = tokens.shape[1] if verifies else 1
        rows = []
        for fed, begin, count, slot in zip(
            tokens.tolist(), start.tolist(), length.tolist(), block_table[:, 0].tolist(), strict=True
        ):
            text = [*self.texts.get(slot, [])[:begin], *fed[:count]]
            if count:
                self.texts[slot] = text
            found = self.parts[0](input_ids=torch.tensor([text or fed]), use_cache=False, return_dict=True)
            rows.append(found.logits[0, -samples:].expand(samples, -1))
        logits_RV = torch.cat(rows)
        off, none = torch.zeros(len(logits_RV)), torch.zeros(len(logits_RV), dtype=torch.int64)
        outputs = sample(logits_RV, off, none, off + 1, off, none, none)
        names = ("token", "logprob", "top_ids", "top_logprobs")
        return {name: value.unflatten(0, (-1, samples)) for name, value in zip(names, outputs, strict=True)}
