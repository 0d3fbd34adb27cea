"""Tokens mixed over the data parallel ranks: each rank then has some of every rank's tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from nxd_infer.context import ParallelContext, current_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.parallel_layers import mappings


def token_shuffle(
    hidden_states: Tensor, seed: int = 0, *, context: ParallelContext | None = None
) -> tuple[Tensor, Tensor]:
    """Return [..., H] with tokens of all data parallel ranks, and what :func:`token_unshuffle` needs.

    The permutation depends on ``seed`` and the number of tokens alone, so that tensor parallel ranks, and a forward
    that is computed again, have the same. Raises ParallelConfigError if the tokens do not divide over the ranks.
    """
    context = current_context() if context is None else context
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    if len(flat) % context.dp.degree:
        raise ParallelConfigError(
            f"{len(flat)} tokens do not divide over {context.dp.degree} data parallel ranks, as shuffling needs"
        )
    permutation = torch.randperm(len(flat), generator=torch.Generator().manual_seed(seed)).to(flat.device)
    mixed = mappings.all_to_all(flat[permutation], "dp", context=context)
    return mixed.view(hidden_states.shape), permutation


def token_unshuffle(hidden_states: Tensor, permutation: Tensor, *, context: ParallelContext | None = None) -> Tensor:
    """Return every token to its rank and place."""
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    own = mappings.all_to_all(flat, "dp", context=context)
    return own[permutation.argsort()].view(hidden_states.shape)
