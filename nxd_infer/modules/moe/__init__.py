"""Mixture of experts: a router sends each token to a few of many MLPs.

::

    routing              which experts a token goes to
    expert_mlps_v2       the experts, with their configurations in moe_configs
    dispatch             tokens to the expert parallel ranks that hold their experts, and back
    moe_parallel_layers  linear layers of all experts, split over tensor and expert parallel ranks
    shared_experts       an MLP for all tokens
    model                the layer made of these
    loss_function        what keeps the experts equally busy

Shapes: T tokens, k experts per token, E experts, H hidden, I intermediate size.
"""

from nxd_infer.modules.moe import loss_function, routing
from nxd_infer.modules.moe.expert_mlps_v2 import ExpertMLPs, ExpertMLPsV2
from nxd_infer.modules.moe.loss_function import load_balancing_loss_func
from nxd_infer.modules.moe.model import MoE
from nxd_infer.modules.moe.moe_configs import BlockwiseMatmulConfig, GLUType, RoutedExpertsMLPOpsConfig
from nxd_infer.modules.moe.routing import GroupLimitedRouter, RouterBase, RouterSinkhorn, RouterTopK
from nxd_infer.modules.moe.shared_experts import SharedExperts

__all__ = [
    "BlockwiseMatmulConfig", "ExpertMLPs", "ExpertMLPsV2", "GLUType", "GroupLimitedRouter", "MoE",
    "RoutedExpertsMLPOpsConfig", "RouterBase", "RouterSinkhorn", "RouterTopK", "SharedExperts",
    "load_balancing_loss_func", "loss_function", "routing",
]  # fmt: skip
