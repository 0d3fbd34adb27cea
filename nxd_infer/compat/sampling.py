"""``neuronx_distributed.utils.sampling``: tokens of logits."""

from __future__ import annotations

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
        top_k = getattr(config, "top_k", None)
        self.on_device_sampling = bool(getattr(config, "on_device_sampling", False))
        self.top_k = int(1 if top_k is None or not getattr(config, "do_sample", False) else top_k)

    def sample(self, token_logits: Tensor) -> Tensor:
        """Return the tokens [b] of logits [b, vocabulary]."""
        k = min(self.top_k, token_logits.shape[-1]) if self.top_k > 0 else token_logits.shape[-1]
        if self.on_device_sampling:
            values, indices = search.topk(token_logits, k, dim=-1, gather_dim=-1)
        else:
            values, indices = torch.topk(token_logits, k, dim=-1)
        if k == 1:
            return indices[..., 0]
        return indices.gather(-1, torch.multinomial(values.float().softmax(-1), 1))[..., 0]

    __call__ = sample
