"""``neuronx_distributed.utils.sampling``: tokens of logits."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from nxd_infer.errors import ModelConfigError
from nxd_infer.parallel_layers import search


class Sampler:
    """Samples by ``do_sample`` and ``top_k`` of a configuration; greedily if ``top_k`` is 1 or ``do_sample`` not set.

    With ``on_device_sampling`` set, logits are this tensor-parallel rank's piece of the vocabulary.
    Raises ModelConfigError for beams.
    """

    def __init__(self, config: Any):
        if (getattr(config, "num_beams", None) or 1) > 1:
            raise ModelConfigError(f"num_beams is {config.num_beams}: this sampler has no beams, use num_beams=1")
        self.find = search.topk if getattr(config, "on_device_sampling", False) else _topk
        draws = getattr(config, "do_sample", False)
        self.top_k: int = (getattr(config, "top_k", None) or sys.maxsize) if draws else 1

    def sample(self, token_logits: Tensor) -> Tensor:
        """Return the tokens [b] of logits [b, vocabulary]."""
        values, indices = self.find(token_logits, min(self.top_k, token_logits.shape[-1]), -1, -1)
        chosen = torch.multinomial(values.float().softmax(-1), 1)  # of one value, that
        return indices.gather(-1, chosen)[..., 0]

    __call__ = sample


def _topk(tensor: Tensor, k: int, dim: int, _: int) -> tuple[Tensor, Tensor]:
    return tuple(tensor.topk(k, dim))  # pyright: ignore[reportReturnType]
