"""Combine the vectors of a text's tokens into one vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.errors import ModelConfigError
from nxd_models.hf.sentence_transformers import POOLINGS
from nxd_models.spec import EncoderConfig


def pooling_modes(pooling: str) -> list[str]:
    """``"cls+mean"`` -> ``["cls", "mean"]``. Raises ModelConfigError for an unknown mode."""
    modes = pooling.split("+")
    if unknown := [mode for mode in modes if mode not in POOLINGS]:
        raise ModelConfigError(
            f"pooling = {pooling!r}: {unknown[0]!r} is not supported; known are {', '.join(POOLINGS)}, "
            "and several of them joined by +"
        )
    return modes


class SentencePooling(nn.Module):
    """Mixin for an encoder, which returns one vector per text then: pools over its tokens, applies the ``dense``
    layers, which are float32, and scales to length 1 if ``normalize``.

    ``pooling``: one of :data:`POOLINGS`, or several joined by ``+``.
    """

    def __init__(
        self,
        config: EncoderConfig,
        dtype: torch.dtype = torch.float32,
        *,
        pooling: str = "mean",
        normalize: bool = True,
        dense: Sequence[Mapping[str, Any]] = (),
    ):
        super().__init__(config, dtype)
        pooling_modes(pooling)
        self.pooling, self.normalize = pooling, normalize
        self.dense = nn.ModuleList(
            nn.Linear(one["inputs"], one["outputs"], one["bias"], dtype=torch.float32) for one in dense
        )
        self.activations = [getattr(nn, one["activation"])() for one in dense]

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Map ids and mask [B, S] to float32 [B, E times modes of pooling], or the last dense layer's outputs."""
        pooled = pool(super().forward(input_ids, attention_mask, token_type_ids), attention_mask, self.pooling)
        for layer, activation in zip(self.dense, self.activations, strict=True):
            pooled = activation(layer(pooled))
        return F.normalize(pooled, dim=-1) if self.normalize else pooled


def pool(hidden_BSE: Tensor, attention_mask_BS: Tensor, pooling: str) -> Tensor:
    """float32 [B, E times modes]: one vector per row, from the positions whose mask is 1; padding is on the right."""
    hidden, seen = hidden_BSE.float(), attention_mask_BS[..., None].float()
    return torch.cat([_pool(hidden, seen, mode) for mode in pooling_modes(pooling)], -1)


def _pool(hidden: Tensor, seen: Tensor, mode: str) -> Tensor:
    if mode == "cls":
        return hidden[:, 0]
    if mode == "max":
        return torch.where(seen > 0, hidden, torch.finfo(hidden.dtype).min).amax(1)
    if mode == "lasttoken":
        last = (seen.long().sum(1, keepdim=True) - 1).clamp(min=0)
        return hidden.gather(1, last.expand(-1, -1, hidden.shape[2])).squeeze(1)
    if mode == "weightedmean":
        seen = seen * torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[None, :, None]
    count = seen.sum(1).clamp(min=1e-9)
    return (hidden * seen).sum(1) / (count.sqrt() if mode == "mean_sqrt_len_tokens" else count)
