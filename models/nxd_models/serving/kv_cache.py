"""The keys and values of earlier tokens: one cache per layer, with a part for every slot."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class LayerCache(NamedTuple):
    """One layer's cache and the places of this step's rows in it; see ``nxd_infer.ops.cache_attention``."""

    keys: Tensor
    """[N, K, L, D], changed in place."""
    values: Tensor
    block_table: Tensor
    start: Tensor
    length: Tensor


class StateList(nn.Module):
    """One state per layer, as the buffers ``0``, ``1``, ...; not in state dicts."""

    def __init__(self, count: int, shape: tuple[int, ...], dtype: torch.dtype):
        super().__init__()
        for i in range(count):
            self.register_buffer(str(i), torch.zeros(shape, dtype=dtype), persistent=False)

    def __getitem__(self, index: int) -> Tensor:
        return self.get_buffer(str(index))
