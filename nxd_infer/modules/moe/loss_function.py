"""The loss that keeps experts equally busy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["load_balancing_loss_func"]


def load_balancing_loss_func(
    concatenated_gate_logits: Tensor | Sequence[Tensor], num_experts: int, top_k: int, mask: Tensor | None = None
) -> Tensor:
    """Return the Switch Transformer's loss, a scalar: ``top_k`` if all experts are equally busy, and more otherwise.

    It is ``num_experts`` times the sum over experts of the share of tokens that choose the expert (no gradient) times
    its mean probability. Equal to the loss of transformers' Mixtral.

    Args:
        concatenated_gate_logits: a router's logits [T, E] of all layers, concatenated along T, or a list of them.
        num_experts, top_k: E, and how many experts a token goes to.
        mask: 0 for the tokens of a layer that do not count.
    """
    logits = concatenated_gate_logits
    logits = logits if isinstance(logits, Tensor) else torch.cat(list(logits))
    logits = logits.reshape(-1, num_experts)
    chances = F.softmax(logits, dim=1, dtype=torch.promote_types(logits.dtype, torch.float32))
    chosen = torch.zeros_like(chances).scatter(1, logits.topk(top_k, dim=1).indices, 1.0)
    counted = torch.ones_like(chances[:, 0])
    if mask is not None:
        counted = (mask != 0).to(chances).flatten().repeat(len(counted) // mask.numel())
    return num_experts * ((counted @ chosen) * (counted @ chances)).sum() / counted.sum() ** 2
