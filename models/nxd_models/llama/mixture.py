"""A feed-forward block of experts, of which a router chooses some for every token: Mixtral's, Qwen3-MoE's.

Each expert's inner dimension is split over the ranks, so every rank has its part of all experts, and routes alike. The
experts themselves are split over expert parallel ranks, in training.

Shapes: B rows, S positions, T = B * S tokens, H hidden size, E experts, k experts of a token, I inner size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.context import ParallelContext
from nxd_infer.errors import ParallelConfigError
from nxd_infer.layout import AxisPlan
from nxd_infer.modules.moe.dispatch import dispatched
from nxd_infer.modules.moe.loss_function import load_balancing_loss_func
from nxd_infer.modules.moe.moe_parallel_layers import expert_axis
from nxd_infer.ops import expert_linear
from nxd_infer.parallel_layers import mappings
from nxd_infer.parallel_layers.base import ParallelLayer
from nxd_models.layers import ACTIVATIONS, SEQUENCE, ParallelBlock, normal_init
from nxd_models.llama.config import LlamaConfig, Mixture
from nxd_models.serving.kv_cache import LayerCache
from nxd_models.spec import Cut


def cuts(mixture: Mixture | None) -> dict[str, Cut]:
    """Return how the weights of experts are split: the gates and what they gate each by rows, the last by columns."""
    if mixture is None:
        return {}
    inner = AxisPlan.padded(mixture.intermediate_size)
    return {"gate_up_proj": Cut(1, AxisPlan.sections([inner, inner])), "down_proj": Cut(2, inner)}


class ExpertWeights(ParallelLayer):
    """``gate_up_proj`` [E, 2 I, H] and ``down_proj`` [E, H, I], this rank's part of I."""

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(self, config: LlamaConfig, mixture: Mixture, dtype: torch.dtype):
        super().__init__()
        self.sizes = (mixture.experts, config.hidden_size)
        self.cuts = cuts(mixture)
        self.fill = normal_init(config.initializer_range)
        self.activation = ACTIVATIONS[config.activation]
        for name, stride in (("gate_up_proj", 2), ("down_proj", 1)):
            self.new_parameter(name, dtype, None, stride=stride)
        self.reset_parameters()

    def axes_of(self, name: str) -> Sequence[AxisPlan | int]:
        experts, hidden = expert_axis(self.sizes[0], self.context), self.sizes[1]
        axis = self.cuts[name].axis
        return (experts, axis, hidden) if name == "gate_up_proj" else (experts, hidden, axis)

    def reset_parameters(self) -> None:
        for name in self.cuts:
            self.init_parameter(name, self.fill)

    def forward(self, x_TH: Tensor, experts_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """Return the weighted sum of the results of each token's experts: this rank's part of it."""
        gate_up, down = (
            mappings.with_mean_gradient(
                self.logical(getattr(self, name), self.elements_of(cut.axis), cut.dimension), context=self.context
            )
            for name, cut in self.cuts.items()
        )
        T, k = experts_Tk.shape
        chosen = experts_Tk.reshape(-1)
        rows = x_TH[:, None].expand(T, k, -1).reshape(T * k, -1)
        rows, here, back = dispatched(rows, chosen, self.sizes[0], self.context)
        gate, up = expert_linear(rows, gate_up, here).chunk(2, -1)
        y = back(expert_linear(self.activation(gate) * up, down, here)).view(T, k, -1)
        return (y * weights_Tk[..., None]).sum(1).to(x_TH.dtype)


class Experts(ParallelBlock):
    """The router and its experts. ``router_logits`` [T, E] are those of the last forward, if the loss needs them."""

    def __init__(self, config: LlamaConfig, mixture: Mixture, dtype: torch.dtype, sequence_parallel: bool = False):
        super().__init__(sequence_parallel)
        self.mixture = mixture
        self.gate = nn.Linear(config.hidden_size, mixture.experts, bias=False, dtype=dtype)
        if not self.gate.weight.is_meta:
            nn.init.normal_(self.gate.weight, std=config.initializer_range)
        self.experts = ExpertWeights(config, mixture, dtype)
        self.router_logits: Tensor | None = None

    def forward(self, x_BSH: Tensor, cache: LayerCache | None = None) -> Tensor:
        x_BSH = self.enter(x_BSH)
        x_TH = x_BSH.flatten(0, 1)
        # The weight is replicated but its gradient comes from this rank's part of the experts.
        router = mappings.copy_to_tensor_model_parallel_region(self.gate.weight, context=self.context)
        logits_TE = F.linear(x_TH, router)
        if self.mixture.balance and torch.is_grad_enabled():
            self.router_logits = logits_TE
        chances_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32)).softmax(-1)
        weights_Tk, experts_Tk = chances_TE.topk(self.mixture.chosen, -1)
        if self.mixture.normalised:
            weights_Tk = weights_Tk / weights_Tk.sum(-1, keepdim=True)
        if cache is not None:  # padding, and slots without a request, read no expert
            live_BS = torch.arange(x_BSH.shape[1], device=x_BSH.device) < cache.length[:, None]
            experts_Tk = torch.where(live_BS.reshape(-1, 1), experts_Tk, -1)
        y = self.experts(x_TH, experts_Tk, weights_Tk).view(x_BSH.shape)
        if self.sequence_parallel_enabled:
            return mappings.reduce_scatter_to_sequence_parallel_region(
                y, SEQUENCE, context=self.context, reduce_dtype=torch.float32
            )
        return mappings.reduce_from_tensor_model_parallel_region(y, context=self.context, reduce_dtype=torch.float32)


def balancing_loss(blocks: Sequence[Experts], mask_BS: Tensor | None, context: ParallelContext) -> Tensor:
    """Return the load balancing loss of all layers; ``mask`` is 0 for padding, which does not count.

    Raises ParallelConfigError in a pipeline, whose stages see some of the layers only.
    """
    found = [block.router_logits for block in blocks if block.router_logits is not None]
    if context.pp.degree > 1 or len(found) < len(blocks):
        raise ParallelConfigError(
            "the load balancing loss is over all layers, which no pipeline stage has: train with "
            "pipeline_parallel_size=1, or set output_router_logits to false in config.json"
        )
    mixture = blocks[0].mixture
    loss = load_balancing_loss_func(found, mixture.experts, mixture.chosen, mask_BS)
    # Every rank has the whole loss, and the gradients of the ranks are summed.
    return loss.detach() + (loss - loss.detach()) / context.tp.degree
