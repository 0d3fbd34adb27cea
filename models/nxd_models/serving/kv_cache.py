"""The keys and values of earlier tokens: one cache per layer, with a part for every slot."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nxd_infer.ops.packed import SCALE_BYTES


class LayerCache(NamedTuple):
    """One layer's cache and the places of this step's rows in it; see ``nxd_infer.ops.cache_attention``."""

    keys: Tensor
    """[N, K, L, D], or int8 [N, K, L, D + 4], changed in place."""
    values: Tensor
    block_table: Tensor
    start: Tensor
    length: Tensor

    @property
    def head_dim(self) -> int:
        """D: the numbers of an entry."""
        *_, width = self.keys.shape
        return width - SCALE_BYTES if self.keys.dtype == torch.int8 else width


class StateList(nn.Module):
    """One state per layer, as the buffers ``0``, ``1``, ...; not in state dicts."""

    def __init__(self, count: int, shape: tuple[int, ...], dtype: torch.dtype):
        super().__init__()
        for i in range(count):
            self.register_buffer(str(i), torch.zeros(shape, dtype=dtype), persistent=False)

    def __getitem__(self, index: int) -> Tensor:
        return self.get_buffer(str(index))
