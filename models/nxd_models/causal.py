"""What causal language models share: documents of one row kept apart, logits of all ranks, and losses that add up.

Shapes: B rows, S positions, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.context import ParallelContext
from nxd_infer.parallel_layers import mappings
from nxd_infer.parallel_layers.loss_functions import IGNORED, parallel_cross_entropy
from nxd_models.serving.kv_cache import LayerCache
from nxd_models.spec import DecoderConfig


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


def sequence_positions(x_BS: Tensor) -> Tensor:
    """Return 0, 1, 2, ... for every row: int64 [B, S]."""
    return torch.arange(x_BS.shape[1], device=x_BS.device).expand(x_BS.shape[0], -1)


class CausalModel(nn.Module):
    """A decoder with its output head. ``config`` and ``context`` are those it was built with."""

    config: DecoderConfig
    context: ParallelContext

    @property
    def decoder(self) -> nn.Module:
        """Maps ids, positions, mask and caches to final hidden states."""
        raise NotImplementedError

    def parallel_logits(self, hidden_BSE: Tensor) -> Tensor:
        """Map final hidden states [..., E] to this rank's logits [..., V / degree]; V is padded at its end."""
        raise NotImplementedError

    def auxiliary_loss(self, mask_BS: Tensor | None) -> Tensor | None:
        """Return what training adds to the loss over the tokens of the last forward, if anything."""
        return None

    def hidden_states(self, ids_BS: Tensor, positions_BS: Tensor, caches: Sequence[LayerCache]) -> Tensor:
        """Map ids at these positions of the cached sequences to final hidden states [B, S, E]."""
        return self.decoder(ids_BS, positions_BS, None, caches)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map final hidden states [..., E] to logits [..., V], complete on every rank, in the model's dtype."""
        whole = mappings.gather_from_tensor_model_parallel_region(self.parallel_logits(hidden), context=self.context)
        vocabulary = self.config.vocab_size
        return whole if whole.shape[-1] == vocabulary else whole.narrow(-1, 0, vocabulary)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits [B, S, V]; with ``labels``, ``(loss, this rank's logits [B, S, V / degree])``.

        ``attention_mask`` [B, S] is 0 for padding; tokens see earlier ones with the same number, so 1 is one document
        per row, and 1, 2, ... are several. ``position_ids`` [B, S] default to 0, 1, 2, ...; several documents restart
        them. ``labels`` [B, S] are the unshifted ids; this method shifts them. -100 is excluded from the mean, which is
        over ``num_items_in_batch`` where that is given: the labels of all microbatches of a step.
        """
        self.config.check_length(input_ids.shape[1])
        hidden = self.decoder(input_ids, position_ids, attention_mask)
        if labels is None:
            return self.logits(hidden)
        logits = self.parallel_logits(hidden)
        shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        losses = parallel_cross_entropy(
            logits, shifted, ignore_index=IGNORED, vocab_size=self.config.vocab_size, context=self.context
        )
        own = (shifted != IGNORED).sum()
        count = own if num_items_in_batch is None else num_items_in_batch
        loss, more = losses.sum() / count, self.auxiliary_loss(attention_mask)
        return loss if more is None else loss + more * (own / count), logits
