"""What causal language models share: documents of one row kept apart, logits of all ranks, and losses that add up.

Shapes: B rows, S positions, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nxd_infer.context import ParallelContext
from nxd_infer.parallel_layers import mappings
from nxd_infer.parallel_layers.loss_functions import IGNORED, parallel_cross_entropy


def seen(mask_BS: Tensor | None) -> Tensor | None:
    """Return which positions each one attends to, bool [B, 1, S, S]; None for a mask of None: all earlier ones.

    ``mask`` is 0 for padding; others see earlier ones of their own number, so 1, 2, ... are documents.
    """
    if mask_BS is None:
        return None
    S = mask_BS.shape[1]
    causal = torch.ones(S, S, dtype=torch.bool, device=mask_BS.device).tril()
    # A padding query attends to itself, so that no row of scores is empty.
    itself = torch.eye(S, dtype=torch.bool, device=mask_BS.device)
    together = (mask_BS[:, :, None] == mask_BS[:, None, :]) & (mask_BS != 0)[:, None, :]
    return (causal & together[:, None]) | itself


def whole_logits(logits: Tensor, vocab_size: int, context: ParallelContext) -> Tensor:
    """Return the logits [..., V] of all ranks, without padding, for this rank's [..., V / degree]."""
    whole = mappings.gather_from_tensor_model_parallel_region(logits, context=context)
    return whole if whole.shape[-1] == vocab_size else whole.narrow(-1, 0, vocab_size)


def causal_loss(
    logits: Tensor, labels_BS: Tensor, vocab_size: int, context: ParallelContext, num_items: Tensor | None
) -> Tensor:
    """Return the loss of this rank's logits [B, S, V / degree].

    ``labels`` are the unshifted ids; -100 is left out. The sum is divided by ``num_items``, those of all microbatches
    of a step, or by the labels of this call.
    """
    wanted = F.pad(labels_BS[:, 1:], (0, 1), value=IGNORED)
    losses = parallel_cross_entropy(logits, wanted, ignore_index=IGNORED, vocab_size=vocab_size, context=context)
    return losses.sum() / ((wanted != IGNORED).sum() if num_items is None else num_items)
