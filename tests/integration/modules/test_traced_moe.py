"""The mixture of experts in a traced model is the one in eager mode, for a prompt and for a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nxd_infer import trace
from nxd_infer.modules.moe import ExpertMLPs, GroupLimitedRouter, MoE, RouterTopK, SharedExperts

H, E, K, INNER = 32, 8, 2, 64


class Mixtures(nn.Module):
    """Dropless experts with shared ones; experts with a capacity and biases."""

    def __init__(self):
        super().__init__()
        self.first = MoE(
            RouterTopK(E, K, H),
            ExpertMLPs(E, K, H, INNER, "silu", normalize_top_k_affinities=True),
            SharedExperts(H, 16, 1, "silu"),
        )
        self.second = MoE(
            GroupLimitedRouter(E, K, H, n_group=4, topk_group=2),
            ExpertMLPs(E, K, H, INNER, "gelu", capacity_factor=1.0, bias=True),
            return_router_logits=True,
            return_expert_index=True,
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (y,) = self.first(x)
        return self.second(x + y)


def mixtures() -> tuple[nn.Module, dict]:
    torch.manual_seed(0)
    return Mixtures().eval(), {}


def hidden(rows: int, length: int) -> torch.Tensor:
    return torch.randn(rows, length, H, generator=torch.Generator().manual_seed(rows + length))


@pytest.mark.parametrize("backend", ["eager", pytest.param("cpu", marks=pytest.mark.smoke)])
def test_traced_at_two_ranks_equals_eager(backend):
    buckets, config = [(hidden(2, 9),), (hidden(2, 1),)], trace.BucketModelConfig(names=["prompt", "step"])
    options = {"bucket_config": config, "inline_weights_to_neff": False, "tp_degree": 2, "backend": backend}
    model = trace.parallel_model_trace(mixtures, buckets, **options)
    with model, torch.no_grad():
        for (x,) in buckets:
            y, logits, index = model(x)
            expected = mixtures()[0](x)
            assert torch.equal(index, expected[2])
            assert (y - expected[0]).abs().max() < 1e-5 and (logits - expected[1]).abs().max() < 1e-5
