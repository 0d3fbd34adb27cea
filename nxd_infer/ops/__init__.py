"""Composite operators: each is one node in an exported graph, with a plain PyTorch reference.

A model calls the operator; in eager mode that runs the reference. A backend with an equivalent native operator uses
that; others inline the reference from :data:`COMPOSITE`. References use only plain ATen operators, have no
data-dependent shapes, and modify only the arguments marked in the schema.
"""

from typing import Any

import torch

from nxd_infer.ops.adjust import adjust_logits, remember_tokens
from nxd_infer.ops.attention import cache_attention, masked_cache_attention
from nxd_infer.ops.composite import COMPOSITE, FAKES
from nxd_infer.ops.experts import expert_linear, packed_experts
from nxd_infer.ops.fused import fused_fake
from nxd_infer.ops.packed import packed_embedding, packed_linears
from nxd_infer.ops.sampling import sample_adjusted
from nxd_infer.ops.step import remember_last, step_rows

FAKES["fused"] = fused_fake

HOST: frozenset[Any] = frozenset(
    {
        torch.ops.nxd.sample_adjusted.default,
        torch.ops.nxd.remember_tokens.default,
    }
)
"""Operators that a device leaves to the host: they touch a few numbers of each row, and their arithmetic is specified
to the bit (64-bit integers and floats), which devices for matrices do not have."""

__all__ = [
    "COMPOSITE", "FAKES", "HOST", "adjust_logits", "cache_attention", "expert_linear", "masked_cache_attention",
    "packed_embedding", "packed_experts", "packed_linears", "remember_last", "remember_tokens", "sample_adjusted",
    "step_rows",
]  # fmt: skip
