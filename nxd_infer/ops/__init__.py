"""Composite operators: one node in an exported graph, each with a plain PyTorch reference beside it.

A model calls the operator; run eagerly it is its reference. A backend with a native operator of the same meaning puts
that in; the others inline the reference, which :data:`COMPOSITE` maps every operator to. References use plain ATen
operators only, have no shape that depends on data, and change nothing but the arguments the schema marks.
"""

from collections.abc import Callable
from typing import Any

import torch

from nxd_infer.ops.attention import cache_attention, cache_attention_reference
from nxd_infer.ops.sampling import sample, sample_reference

COMPOSITE: dict[Any, Callable[..., Any]] = {
    torch.ops.nxd.cache_attention.default: cache_attention_reference,
    torch.ops.nxd.sample.default: sample_reference,
}
"""``OpOverload -> reference``. Both take the same positional arguments."""

__all__ = ["COMPOSITE", "cache_attention", "cache_attention_reference", "sample", "sample_reference"]
