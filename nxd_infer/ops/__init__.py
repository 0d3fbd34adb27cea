"""Composite operators: each is one node in an exported graph, with a plain PyTorch reference.

A model calls the operator; in eager mode that runs the reference. A backend with an equivalent native operator uses
that; others inline the reference from :data:`COMPOSITE`. References use only plain ATen operators, have no
data-dependent shapes, and modify only the arguments marked in the schema.
"""

from collections.abc import Callable
from typing import Any

import torch

from nxd_infer.ops.adjust import (
    adjust_logits,
    remember_tokens,
    remember_tokens_fake,
    remember_tokens_reference,
)
from nxd_infer.ops.attention import (
    cache_attention,
    cache_attention_fake,
    cache_attention_reference,
    masked_cache_attention,
)
from nxd_infer.ops.fused import fused_fake
from nxd_infer.ops.packed import (
    packed_embedding,
    packed_embedding_fake,
    packed_embedding_reference,
    packed_linear,
    packed_linear_fake,
    packed_linear_reference,
    packed_linears,
    packed_linears_fake,
    packed_linears_reference,
)
from nxd_infer.ops.packed_int8 import (
    packed_int8_embedding,
    packed_int8_embedding_fake,
    packed_int8_embedding_reference,
    packed_int8_linear,
    packed_int8_linear_reference,
    packed_int8_linears,
    packed_int8_linears_reference,
)
from nxd_infer.ops.sampling import (
    sample,
    sample_adjusted,
    sample_adjusted_fake,
    sample_adjusted_reference,
    sample_fake,
    sample_reference,
)
from nxd_infer.ops.step import (
    remember_last,
    remember_last_fake,
    remember_last_reference,
    step_rows,
    step_rows_fake,
    step_rows_reference,
)

COMPOSITE: dict[Any, Callable[..., Any]] = {
    torch.ops.nxd.cache_attention.default: cache_attention_reference,
    torch.ops.nxd.packed_embedding.default: packed_embedding_reference,
    torch.ops.nxd.packed_int8_embedding.default: packed_int8_embedding_reference,
    torch.ops.nxd.packed_int8_linear.default: packed_int8_linear_reference,
    torch.ops.nxd.packed_int8_linears.default: packed_int8_linears_reference,
    torch.ops.nxd.packed_linear.default: packed_linear_reference,
    torch.ops.nxd.packed_linears.default: packed_linears_reference,
    torch.ops.nxd.remember_last.default: remember_last_reference,
    torch.ops.nxd.remember_tokens.default: remember_tokens_reference,
    torch.ops.nxd.sample.default: sample_reference,
    torch.ops.nxd.sample_adjusted.default: sample_adjusted_reference,
    torch.ops.nxd.step_rows.default: step_rows_reference,
}
"""``OpOverload -> reference``. Both take the same positional arguments."""

HOST: frozenset[Any] = frozenset(
    {
        torch.ops.nxd.sample.default,
        torch.ops.nxd.sample_adjusted.default,
        torch.ops.nxd.remember_tokens.default,
    }
)
"""Operators that a device leaves to the host: they touch a few numbers of each row, and their arithmetic is specified
to the bit (64-bit integers and floats), which devices for matrices do not have."""

FAKES: dict[str, Callable[..., Any]] = {
    "cache_attention": cache_attention_fake,
    "fused": fused_fake,
    "packed_embedding": packed_embedding_fake,
    "packed_int8_embedding": packed_int8_embedding_fake,
    "packed_int8_linear": packed_linear_fake,
    "packed_int8_linears": packed_linears_fake,
    "packed_linear": packed_linear_fake,
    "packed_linears": packed_linears_fake,
    "remember_last": remember_last_fake,
    "remember_tokens": remember_tokens_fake,
    "sample": sample_fake,
    "sample_adjusted": sample_adjusted_fake,
    "step_rows": step_rows_fake,
}
"""Fake kernels (shapes only), shared with the native operators of the same names."""

__all__ = [
    "COMPOSITE",
    "FAKES",
    "HOST",
    "adjust_logits",
    "cache_attention",
    "cache_attention_reference",
    "masked_cache_attention",
    "packed_embedding",
    "packed_int8_embedding",
    "packed_int8_linear",
    "packed_int8_linears",
    "packed_linear",
    "packed_linears",
    "remember_last",
    "remember_tokens",
    "remember_tokens_reference",
    "sample",
    "sample_adjusted",
    "sample_adjusted_reference",
    "sample_reference",
    "step_rows",
]
