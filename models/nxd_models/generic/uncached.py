"""A causal language model of transformers whose state our cache cannot hold: each step reads the whole text anew.

Exact for whatever the model keeps of a text, because it keeps nothing; slow, because a token costs a text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nxd_models.generic.build import adopt, parallel_model
from nxd_models.generic.config import GenericDecoderConfig
from nxd_models.serving.decoder_step import DecoderStep
from nxd_models.serving.kv_cache import LayerCache


class UncachedLM(nn.Module):
    """Ids to logits by transformers' own code. Names are transformers'."""

    def __init__(self, config: GenericDecoderConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        model = parallel_model("AutoModelForCausalLM", config.raw, dtype)
        adopt(self, model)
        self.parts = (model,)  # in a tuple, because its modules are registered already

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return logits [B, S, V]."""
        self.config.check_length(input_ids.shape[1])
        given = {} if attention_mask is None else {"attention_mask": attention_mask}
        return self.parts[0](input_ids=input_ids, use_cache=False, return_dict=True, **given).logits


class UncachedStep(DecoderStep, UncachedLM):
    """A step whose state is the text of each slot; a text's end is followed by what was there before, unread."""

    nxd_equal_ranks = True
    text: Tensor

    def __init__(self, config: GenericDecoderConfig, dtype: torch.dtype = torch.float32, **options: Any):
        super().__init__(dataclasses.replace(config, num_layers=1), dtype, **options)
        self.register_buffer("text", torch.zeros(self.slots + 1, self.max_len, dtype=torch.int64), persistent=False)

    @property
    def nxd_states(self) -> list[str]:
        return ["text", *(name for name in super().nxd_states if "cache" not in name)]

    def hidden_states(self, ids_BS: Tensor, positions_BS: Tensor, caches: Sequence[LayerCache]) -> Tensor:
        """Put ids at these positions of the texts, and return the logits there [B, S, V]."""
        _, _, table, _, length = caches[0]
        step_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
        live_BS = step_S < length[:, None]
        slot_BS = torch.where(live_BS, table, self.slots)
        at_BS = positions_BS.clamp(0, self.max_len - 1)
        torch.ops.aten.index_put_(self.text, [slot_BS, at_BS], ids_BS)
        logits_BTV = UncachedLM.forward(self, self.text.index_select(0, slot_BS[:, 0]))
        return logits_BTV.gather(1, at_BS[..., None].expand(-1, -1, logits_BTV.shape[-1]))

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden
