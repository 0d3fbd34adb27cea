"""Rows of tokens on the expert parallel rank that holds their expert, and back: one all-to-all in each direction."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nxd_infer import comm
from nxd_infer.context import ParallelContext
from nxd_infer.parallel_layers import mappings


def within_capacity(expert_index: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Return [T, k]: whether the expert still takes the token. The first ``capacity`` tokens of each expert stay."""
    chosen = expert_index.new_zeros(expert_index.shape[0], num_experts).scatter(1, expert_index, 1)
    return chosen.cumsum(0).gather(1, expert_index) <= capacity


def dispatched(
    rows: Tensor, experts: Tensor, num_experts: int, context: ParallelContext
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Send each of ``rows`` [N, H] to the rank that holds its expert; one whose expert is -1 goes nowhere.

    Returns the rows that this rank's experts get [M, H], which of these experts each is for ([M], -1 for padding), and
    a function that takes the results [M, O] back, to [N, O] in the order of ``rows``, zeros for what went nowhere.

    Every pair of ranks exchanges as many rows as the largest pair has, padded.
    """
    degree = context.ep.degree
    if degree == 1:
        return rows, experts, lambda results: results
    each = num_experts // degree
    rank_of = torch.where(experts < 0, degree, experts // each)
    sizes = torch.bincount(rank_of, minlength=degree + 1)[:degree]
    most = max(1, int(comm.all_reduce(sizes.max()[None], context, "ep", "max")))
    order = rank_of.argsort(stable=True)[: int(sizes.sum())]
    starts = sizes.cumsum(0) - sizes
    place = rank_of[order] * most + torch.arange(len(order), device=order.device) - starts[rank_of[order]]
    sent = rows.new_zeros(degree * most, rows.shape[1]).index_copy(0, place, rows[order])
    ids = place.new_full((degree * most,), -1).index_copy(0, place, experts[order] % each)

    def back(results: Tensor) -> Tensor:
        own = mappings.all_to_all(results, context=context)[place]
        return own.new_zeros(len(rows), own.shape[1]).index_copy(0, order, own)

    return mappings.all_to_all(sent, context=context), comm.all_to_all(ids, context, "ep"), back
