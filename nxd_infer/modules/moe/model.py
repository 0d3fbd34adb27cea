"""The mixture of experts as a layer: router, routed experts, shared experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nxd_infer.errors import ParallelConfigError
from nxd_infer.modules.moe.expert_mlps_v2 import ExpertMLPsV2
from nxd_infer.modules.moe.routing import RouterBase
from nxd_infer.modules.moe.shared_experts import SharedExperts
from nxd_infer.parallel_layers import mappings


class MoE(nn.Module):
    """``output, ... = moe(hidden_states)``: a tuple of the output and what else is asked for.

    Args:
        rmsnorm: a module that is applied to the input first.
        sequence_parallel_enabled, sequence_dimension: hidden states are this rank's piece of the sequence (None: the
            first dimension), and so is the output. The router follows.
        return_router_logits: return the logits [T, E] of all tokens next, for ``load_balancing_loss_func``.
        return_expert_index: return the chosen experts [T, k] last.
        token_shuffle_group_size: must be 1, like the defaults of ``init_tkg_module`` and ``tkg_config``.

    Over tensor parallel ranks there is one collective before the experts, with their backward's, and one after.
    """

    def __init__(
        self,
        router: RouterBase,
        expert_mlps: ExpertMLPsV2,
        shared_experts: SharedExperts | None = None,
        rmsnorm: nn.Module | None = None,
        sequence_parallel_enabled: bool = False,
        return_expert_index: bool = False,
        return_router_logits: bool = False,
        sequence_dimension: int | None = None,
        init_tkg_module: bool = False,
        tkg_config: None = None,
        token_shuffle_group_size: int = 1,
        token_shuffle_seed: int | None = None,
    ):
        super().__init__()
        if init_tkg_module or tkg_config is not None:
            raise ParallelConfigError("init_tkg_module and tkg_config are for a device's kernel: leave them out")
        if router.num_experts != expert_mlps.num_experts or router.top_k != expert_mlps.top_k:
            raise ParallelConfigError(
                f"the router chooses {router.top_k} of {router.num_experts} experts, and there are to be "
                f"{expert_mlps.top_k} of {expert_mlps.num_experts}: give both the same numbers"
            )
        if token_shuffle_group_size != 1:
            raise ParallelConfigError(
                f"token_shuffle_group_size={token_shuffle_group_size}: tokens stay on their ranks, leave it out"
            )
        self.sequence_parallel_enabled, self.sequence_dimension = sequence_parallel_enabled, sequence_dimension or 0
        if sequence_parallel_enabled:
            router.split_sequence(sequence_dimension)
        elif router.sequence_parallel_enabled:
            raise ParallelConfigError("the router takes a piece of the sequence: pass sequence_parallel_enabled=True")
        self.router, self.expert_mlps, self.shared_experts = router, expert_mlps, shared_experts
        self.rmsnorm = rmsnorm
        self.return_router_logits, self.return_expert_index = return_router_logits, return_expert_index

    def forward(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """Map hidden states [..., H]; ``padding_mask`` marks the whole sequence's tokens with 1, and padding with 0."""
        x = hidden_states if self.rmsnorm is None else self.rmsnorm(hidden_states)
        context, axis, dim = self.expert_mlps.context, self.expert_mlps.axis, self.sequence_dimension
        logits, affinities, index = self.router(x)
        here = {"process_group": axis, "context": context, "reduce_dtype": torch.float32}
        affinities = mappings.copy_to_tensor_model_parallel_region(affinities, **here)
        if self.sequence_parallel_enabled:
            x = mappings.gather_from_sequence_parallel_region(x, dim, **here)
        else:
            x = mappings.copy_to_tensor_model_parallel_region(x, **here)
        y = self.expert_mlps.partial(x.reshape(-1, x.shape[-1]), affinities, index, padding_mask).view(x.shape)
        if self.shared_experts is not None:
            y = y + self.shared_experts.partial(x)
        if self.sequence_parallel_enabled:
            y = mappings.reduce_scatter_to_sequence_parallel_region(y, dim, **here)
        else:
            y = mappings.reduce_from_tensor_model_parallel_region(y, **here)
        also = [*([logits] if self.return_router_logits else []), *([index] if self.return_expert_index else [])]
        return (y, *also)
