"""Routers: which experts each token goes to, and with which weights.

A router returns ``(router_logits [T, E], expert_affinities [T, E], expert_index [T, k])``; affinities are those of all
experts, and the experts' module takes the chosen ones.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.modules.moe.moe_parallel_layers import LinearRouter
from nxd_infer.parallel_layers import mappings
from nxd_infer.parallel_layers.base import DeviceLike
from nxd_infer.parallel_layers.mappings import axis_of

Routing: TypeAlias = tuple[Tensor, Tensor, Tensor]

ACT_FNS = ("softmax", "sigmoid")


class RouterBase(nn.Module):
    """A linear layer ``linear_router`` (weight [E, H], equal on all ranks), and what its logits mean.

    Args:
        act_fn: ``"softmax"`` or ``"sigmoid"``, from logits to affinities.
        sequence_parallel_enabled, sequence_dimension: the input is this rank's piece of the sequence (None: the first
            dimension); the logits are gathered.
        dtype: of the weight, the logits and the affinities.
        apply_act_fn_over_topk: affinities are the function of the chosen logits alone; the others' are 0.
        store_transposed_weights: must be False.

    Raises ParallelConfigError for values out of range.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        act_fn: str = "softmax",
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: DeviceLike = None,
        bias: bool = False,
        *,
        apply_act_fn_over_topk: bool = False,
        store_transposed_weights: bool = False,
        tensor_model_parallel_group: object = None,
    ):
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ParallelConfigError(f"top_k must be 1 to num_experts = {num_experts}, got {top_k}")
        if act_fn not in ACT_FNS:
            raise ParallelConfigError(f"act_fn must be one of {', '.join(ACT_FNS)}, got {act_fn!r}")
        if store_transposed_weights:
            raise ParallelConfigError("store_transposed_weights=True is for a device's kernel: leave it out")
        self.num_experts, self.top_k, self.hidden_size, self.act_fn = num_experts, top_k, hidden_size, act_fn
        self.apply_act_fn_over_topk = apply_act_fn_over_topk
        self.context = current_context()
        self.axis = axis_of(tensor_model_parallel_group, self.context)
        self.linear_router = LinearRouter(hidden_size, num_experts, bias, dtype, device)
        self.sequence_parallel_enabled, self.sequence_dimension = False, 0
        if sequence_parallel_enabled:
            self.split_sequence(sequence_dimension)

    def split_sequence(self, sequence_dimension: int | None) -> None:
        """Take this rank's piece of the sequence from now on."""
        self.sequence_parallel_enabled, self.sequence_dimension = True, sequence_dimension or 0
        self.linear_router.sequence_parallel_enabled = True
        self.linear_router._mark()

    def get_router_logits(self, hidden_states: Tensor) -> Tensor:
        """Return the logits [T, E] of all tokens of [..., H], in the router's dtype."""
        logits = self.linear_router(hidden_states)
        if self.sequence_parallel_enabled:
            logits = mappings.gather_from_sequence_parallel_region(
                logits, self.sequence_dimension, False, self.axis, context=self.context
            )
        return logits.reshape(-1, self.num_experts)

    def apply_activation_fn(self, router_logits: Tensor) -> Tensor:
        """Return the affinities of logits, over the last dimension."""
        return F.softmax(router_logits, dim=-1) if self.act_fn == "softmax" else torch.sigmoid(router_logits)

    def forward(self, hidden_states: Tensor) -> Routing:
        """Return ``(router_logits, expert_affinities, expert_index)`` for hidden states [..., H]."""
        logits = self.get_router_logits(hidden_states)
        index = self.choose(logits)
        if not self.apply_act_fn_over_topk:
            return logits, self.apply_activation_fn(logits), index
        chosen = self.apply_activation_fn(logits.gather(1, index))
        return logits, torch.zeros_like(logits).scatter(1, index, chosen), index

    def choose(self, router_logits: Tensor) -> Tensor:
        """Return the experts [T, k] of each token."""
        raise NotImplementedError(f"{type(self).__name__} does not say which experts it chooses")


class RouterTopK(RouterBase):
    """Each token goes to the ``top_k`` experts with the largest logits. The arguments are those of RouterBase."""

    def choose(self, router_logits: Tensor) -> Tensor:
        return router_logits.topk(self.top_k, dim=1).indices


class RouterSinkhorn(RouterBase):
    """Training balances the experts: a token's expert is the largest of its row after Sinkhorn's iterations.

    In evaluation it is the largest logit. The logits are scaled, row by row and column by column, until each token has
    an equal share and each expert takes an equal share of the tokens.

    Args:
        sinkhorn_iterations: how often rows and columns are scaled; None is 30.
        sinkhorn_tol: end earlier, when the columns' factors change by less on average.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        act_fn: str = "sigmoid",
        *args: object,
        sinkhorn_iterations: int | None = None,
        sinkhorn_tol: float | None = None,
        **kwargs: object,
    ):
        super().__init__(num_experts, top_k, hidden_size, act_fn, *args, **kwargs)  # pyright: ignore
        self.sinkhorn_iterations = 30 if sinkhorn_iterations is None else sinkhorn_iterations
        self.sinkhorn_tol = sinkhorn_tol

    def choose(self, router_logits: Tensor) -> Tensor:
        scores = router_logits.detach()
        if self.training:
            scores = sinkhorn(scores, self.sinkhorn_iterations, self.sinkhorn_tol)
        return scores.topk(self.top_k, dim=1).indices


def sinkhorn(logits: Tensor, iterations: int, tolerance: float | None = None) -> Tensor:
    """Return [T, E]: exp(logits) with rows and columns scaled in turn, so that all rows and all columns sum to equal
    shares of 1. It ends after a scaling of the columns, by less than ``tolerance`` on average if one is given."""
    # A row's factor takes up whatever its logits are shifted by, so they may be shifted to where exp cannot overflow.
    cost = torch.exp(logits - logits.amax(dim=1, keepdim=True))
    rows, columns = cost.new_ones(cost.shape[0]), cost.new_ones(cost.shape[1])
    eps = torch.finfo(cost.dtype).tiny
    for _ in range(iterations):
        rows = 1 / (cost.shape[0] * ((cost * columns).sum(1) + eps))
        before, columns = columns, 1 / (cost.shape[1] * ((cost * rows[:, None]).sum(0) + eps))
        if tolerance is not None and float((columns - before).abs().mean()) < tolerance:
            break
    return cost * rows[:, None] * columns


class GroupLimitedRouter(RouterBase):
    """DeepSeek-V3's: a token's experts come from the ``topk_group`` best of ``n_group`` groups of neighbouring experts.

    A group's score is the sum of its two best experts'. Choosing adds the buffer ``e_score_correction_bias`` [E] to the
    affinities, which balances the experts without a loss; the affinities themselves do not have it.

    """

    e_score_correction_bias: Tensor

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        n_group: int,
        topk_group: int,
        act_fn: str = "sigmoid",
        **kwargs: object,
    ):
        super().__init__(num_experts, top_k, hidden_size, act_fn, **kwargs)  # pyright: ignore
        if num_experts % n_group or not 1 <= topk_group <= n_group or top_k > num_experts // n_group * topk_group:
            raise ParallelConfigError(
                f"{topk_group} of {n_group} groups of {num_experts} experts do not give each token {top_k} experts: "
                "n_group must divide num_experts, and topk_group be 1 to n_group, with enough experts in these groups"
            )
        self.n_group, self.topk_group = n_group, topk_group
        weight = self.linear_router.weight
        self.register_buffer("e_score_correction_bias", torch.zeros_like(weight[:, 0], requires_grad=False))

    def reset_parameters(self) -> None:
        self.e_score_correction_bias.zero_()

    def choose(self, router_logits: Tensor) -> Tensor:
        scores = self.apply_activation_fn(router_logits.detach()) + self.e_score_correction_bias
        groups = scores.unflatten(1, (self.n_group, -1))
        best = groups.topk(min(2, groups.shape[2]), dim=2).values.sum(2).topk(self.topk_group, dim=1).indices
        inside = torch.zeros_like(groups[:, :, 0], dtype=torch.bool).scatter(1, best, True)
        return groups.masked_fill(~inside[:, :, None], float("-inf")).flatten(1).topk(self.top_k, dim=1).indices
