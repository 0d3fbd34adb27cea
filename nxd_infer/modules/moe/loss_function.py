"""The loss that keeps experts equally busy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["load_balancing_loss_func"]


def load_balancing_loss_func(
    concatenated_gate_logits: Tensor | Sequence[Tensor], num_experts: int, top_k: int
) -> Tensor:
    """Return the Switch Transformer's loss, a scalar: ``top_k`` if all experts are equally busy, and more otherwise.

    It is ``num_experts`` times the sum over experts of the share of tokens that choose the expert (no gradient) times
    its mean probability. Equal to the loss of transformers' Mixtral.

    Args:
        concatenated_gate_logits: a router's logits [T, E] of all layers, concatenated along T, or a list of them.
        num_experts, top_k: E, and how many experts a token goes to.
    """
    logits = concatenated_gate_logits
    logits = logits if isinstance(logits, Tensor) else torch.cat(list(logits))
    logits = logits.reshape(-1, num_experts)
    chosen = logits.topk(top_k, dim=1).indices
    wide = torch.promote_types(logits.dtype, torch.float32)
    busy = torch.zeros_like(logits, dtype=wide).scatter(1, chosen, 1.0).mean(0)
    return num_experts * (busy * F.softmax(logits, dim=1, dtype=wide).mean(0)).sum()
