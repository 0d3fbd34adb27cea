"""The mixture of experts in one process, against a loop over tokens and experts, and against transformers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from nxd_infer.errors import ParallelConfigError
from nxd_infer.modules.moe import (
    BlockwiseMatmulConfig,
    ExpertMLPs,
    ExpertMLPsV2,
    GLUType,
    GroupLimitedRouter,
    MoE,
    RoutedExpertsMLPOpsConfig,
    RouterSinkhorn,
    RouterTopK,
    SharedExperts,
    loss_function,
)
from nxd_infer.modules.moe.moe_parallel_layers import ExpertFusedColumnParallelLinear, ExpertFusedRowParallelLinear

E, K, H, INNER = 6, 2, 8, 12
DOUBLE = torch.float64


def moe(dtype: torch.dtype = DOUBLE, router: type = RouterTopK, **options) -> MoE:
    torch.manual_seed(0)
    experts = ExpertMLPs(E, K, H, INNER, "silu", dtype=dtype, **{"normalize_top_k_affinities": True, **options})
    return MoE(router(E, K, H, dtype=dtype), experts, return_router_logits=True, return_expert_index=True)


def by_loop(layer: MoE, x: Tensor, capacity: int | None = None, early: bool = False) -> Tensor:
    """Token after token, expert after expert. With a capacity, an expert that is full takes no more."""
    mlp, router = layer.expert_mlps.mlp_op, layer.router.linear_router.weight
    out, taken = torch.zeros_like(x), [0] * E
    for position, token in enumerate(x.view(-1, H)):
        probabilities = torch.softmax(router @ token, 0)
        chosen = probabilities.topk(K).indices.tolist()
        total = sum(probabilities[e] for e in chosen) if layer.expert_mlps.normalize_top_k_affinities else 1.0
        for e in chosen:
            taken[e] += 1
            if capacity is not None and taken[e] > capacity:
                continue
            weight = probabilities[e] / total
            given = token * weight if early else token
            gate, up = (given @ mlp.gate_up_proj.weight[e]).chunk(2)
            result = (F.silu(gate) * up) @ mlp.down_proj.weight[e]
            out.view(-1, H)[position] += result if early else result * weight
    return out


def tokens(*shape: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.randn(*shape, H, dtype=dtype, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalize_top_k_affinities": False},
        {"early_expert_affinity_modulation": True},
        {"capacity_factor": 0.5},
        {"capacity_factor": 1.0, "early_expert_affinity_modulation": True},
        {"capacity_factor": 100.0},
    ],
)
def test_output_and_gradients_are_those_of_a_loop_over_tokens_and_experts(options):
    layer, x = moe(**options), tokens(3, 5)
    factor = options.get("capacity_factor")
    capacity = None if factor is None else min(15, math.ceil(15 * K * factor / E))
    parameters = list(layer.parameters())
    y, logits, index = layer(x)
    expected = by_loop(layer, x, capacity, options.get("early_expert_affinity_modulation", False))
    assert torch.allclose(y, expected, rtol=0, atol=1e-14)
    assert logits.shape == (15, E) and index.shape == (15, K)
    weights = torch.randn_like(y)
    ours = torch.autograd.grad((y * weights).sum(), parameters)
    theirs = torch.autograd.grad((expected * weights).sum(), parameters)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-13) for a, b in zip(ours, theirs, strict=True))
    if factor == 0.5:
        assert not torch.allclose(y, by_loop(layer, x)), "a capacity of half an equal share drops tokens"


def test_shapes_names_and_initial_values():
    """Every expert starts as the nn.Linear layers of one after another would, whatever the layout."""
    layer = moe(torch.float32)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "router.linear_router.weight": (E, H),
        "expert_mlps.mlp_op.gate_up_proj.weight": (E, H, 2 * INNER),
        "expert_mlps.mlp_op.down_proj.weight": (E, INNER, H),
    }
    weight = layer.expert_mlps.mlp_op.gate_up_proj.weight
    assert weight.partition_dim == 2 and weight.partition_stride == 2 and weight.tensor_model_parallel
    bound = 1 / math.sqrt(H)
    assert 0.9 * bound < weight.abs().max() <= bound


@pytest.mark.parametrize("normalize", [True, False])
def test_qwen3_moe_of_transformers(normalize):
    config = Qwen3MoeConfig(
        hidden_size=H, moe_intermediate_size=INNER, num_experts=E, num_experts_per_tok=K, norm_topk_prob=normalize
    )
    same_as_transformers(Qwen3MoeSparseMoeBlock(config), normalize_top_k_affinities=normalize)


def test_mixtral_of_transformers():
    config = MixtralConfig(hidden_size=H, intermediate_size=INNER, num_local_experts=E, num_experts_per_tok=K)
    same_as_transformers(MixtralSparseMoeBlock(config))


def same_as_transformers(block, **options) -> None:
    torch.manual_seed(3)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layer = moe(torch.float32, **options)
    with torch.no_grad():
        layer.router.linear_router.weight.copy_(block.gate.weight)
        layer.expert_mlps.mlp_op.gate_up_proj.weight.copy_(block.experts.gate_up_proj.transpose(1, 2))
        layer.expert_mlps.mlp_op.down_proj.weight.copy_(block.experts.down_proj.transpose(1, 2))
    x = tokens(2, 7, dtype=torch.float32)
    y, *_ = layer(x)
    expected = block(x)
    assert torch.allclose(y, expected, rtol=0, atol=1e-5)
    y.square().sum().backward()
    expected.square().sum().backward()
    gradient = layer.router.linear_router.weight.grad
    assert torch.allclose(gradient, block.gate.weight.grad, rtol=0, atol=1e-4)


def test_the_router_computes_in_float32_whatever_the_models_dtype():
    layer, x = moe(torch.float32), tokens(4, dtype=torch.float32)
    _, plain, _ = layer(x)
    half = layer.to(torch.bfloat16)
    y, logits, _ = half(x.bfloat16())
    weight = half.router.linear_router.weight.float()
    assert y.dtype == torch.bfloat16 and logits.dtype == torch.float32
    assert torch.equal(logits, x.bfloat16().float() @ weight.T)
    with torch.autocast("cpu", torch.bfloat16):
        y, logits, _ = moe(torch.float32)(x)
    assert torch.equal(logits, plain) and y.dtype == torch.bfloat16


def test_biases_swiglu_and_padding():
    """The MLP of GPT-OSS: limits, biases, scaled sigmoid; padded tokens give zeros."""
    config = RoutedExpertsMLPOpsConfig(
        E,
        H,
        INNER,
        K,
        bias=True,
        glu_type="swiglu",
        hidden_act_scaling_factor=1.7,
        hidden_act_bias=1.0,
        gate_clamp_upper_limit=0.5,
        up_clamp_upper_limit=0.4,
        up_clamp_lower_limit=-0.4,
    )
    torch.manual_seed(0)
    experts = ExpertMLPsV2(config, BlockwiseMatmulConfig.from_kwargs(block_size=256), dtype=DOUBLE)
    router = RouterTopK(E, K, H, dtype=DOUBLE, bias=True, apply_act_fn_over_topk=True)
    x, mask = tokens(9), torch.tensor([1, 1, 0, 1, 1, 1, 0, 1, 1])
    (y,) = MoE(router, experts)(x, mask)
    mlp = experts.mlp_op
    for token, result, counts in zip(x, y, mask, strict=True):
        best = router.linear_router(token).topk(K)
        expected = torch.zeros(H, dtype=DOUBLE)
        for e, affinity in zip(best.indices.tolist(), best.values.softmax(0), strict=True):
            gate, up = (token @ mlp.gate_up_proj.weight[e] + mlp.gate_up_proj.bias[e]).chunk(2)
            gate, up = gate.clamp(max=0.5), up.clamp(-0.4, 0.4)
            inner = gate * torch.sigmoid(1.7 * gate) * (up + 1)
            expected += affinity * (inner @ mlp.down_proj.weight[e] + mlp.down_proj.bias[e])
        assert torch.allclose(result, expected * counts, rtol=0, atol=1e-14)
    assert config.glu_type is GLUType.SWIGLU


def test_experts_without_a_gate_and_shared_experts():
    torch.manual_seed(0)
    experts = ExpertMLPs(E, K, H, INNER, "gelu", glu_mlp=False, dtype=DOUBLE)
    for fused in (True, False):
        shared = SharedExperts(H, 5, 2, "silu", dtype=DOUBLE, fused_gate_up_projection=fused)
        router, x = RouterTopK(E, K, H, act_fn="sigmoid", dtype=DOUBLE), tokens(2, 3)
        (y,) = MoE(router, experts, shared)(x)
        logits = x @ router.linear_router.weight.T
        expected = shared(x)
        for b in range(2):
            for s in range(3):
                for e in logits[b, s].topk(K).indices.tolist():
                    inner = F.gelu(x[b, s] @ experts.mlp_op.up_proj.weight[e])
                    expected[b, s] += torch.sigmoid(logits[b, s, e]) * (inner @ experts.mlp_op.down_proj.weight[e])
        assert torch.allclose(y, expected, rtol=0, atol=1e-14)


def test_sinkhorn_balances_in_training_and_is_its_definition():
    torch.manual_seed(0)
    router = RouterSinkhorn(4, 1, H, dtype=DOUBLE, sinkhorn_iterations=60)
    x = tokens(32)
    with torch.no_grad():
        router.linear_router.weight[0] += 1.0  # many tokens like one expert best
        x += 0.5
        logits, affinities, index = router(x)
        transport = torch.exp(logits)
        for _ in range(60):
            transport = transport / transport.sum(1, keepdim=True) / 32
            transport = transport / transport.sum(0, keepdim=True) / 4
    assert torch.equal(index[:, 0], transport.argmax(1)) and torch.equal(affinities, torch.sigmoid(logits))
    unbalanced = torch.bincount(router.eval()(x)[2][:, 0], minlength=4).max()
    assert torch.bincount(index[:, 0], minlength=4).max() < unbalanced
    assert torch.equal(router(x)[2][:, 0], logits.argmax(1)), "evaluation takes the largest logit"
    early = RouterSinkhorn(4, 1, H, dtype=DOUBLE, sinkhorn_iterations=10**6, sinkhorn_tol=1e-9)
    early.load_state_dict(router.state_dict())
    assert torch.equal(early(x)[2], index)


def test_group_limited_router_is_deepseek_v3s():
    config = DeepseekV3Config(
        hidden_size=H, n_routed_experts=12, num_experts_per_tok=3, n_group=4, topk_group=2, norm_topk_prob=True
    )
    theirs = DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(theirs.weight)
    theirs.e_score_correction_bias.normal_(std=0.2)
    ours = GroupLimitedRouter(12, 3, H, n_group=4, topk_group=2)
    ours.linear_router.weight.data.copy_(theirs.weight)
    ours.e_score_correction_bias.copy_(theirs.e_score_correction_bias)
    x = tokens(40, dtype=torch.float32)
    logits, affinities, index = ours(x)
    _, weights, chosen = theirs(x)
    assert torch.equal(index.sort(1).values, chosen.sort(1).values)
    found = torch.zeros_like(logits).scatter(1, chosen, weights / config.routed_scaling_factor)
    picked = affinities.gather(1, index)
    assert torch.allclose(found.gather(1, index), picked / picked.sum(1, keepdim=True))


def test_load_balancing_loss_is_transformers():
    layers = tuple(torch.randn(20, E, generator=torch.Generator().manual_seed(n)) for n in range(3))
    expected = load_balancing_loss_func(layers, E, K)
    for given in (torch.cat(layers), layers):
        assert torch.allclose(loss_function.load_balancing_loss_func(given, E, K), expected)


def test_expert_fused_layers_take_tokens_by_expert_or_rows():
    torch.manual_seed(0)
    first, second = ExpertFusedColumnParallelLinear(E, H, 6, bias=True), ExpertFusedRowParallelLinear(E, 6, H)
    x = torch.randn(E, 2, 4, H)
    y = second(first(x))
    assert y.shape == (E, 2, 4, H)
    rows = second(first(x.view(-1, H), torch.arange(E).repeat_interleave(8)), torch.arange(E).repeat_interleave(8))
    assert torch.allclose(rows, y.view(-1, H), atol=1e-6)
    assert torch.allclose(y[2], (x[2] @ first.weight[2] + first.bias[2]) @ second.weight[2], atol=1e-6)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RouterTopK(4, 5, H), "top_k must be 1 to num_experts = 4, got 5"),
        (lambda: RouterTopK(4, 2, H, act_fn="tanh"), "act_fn must be one of softmax, sigmoid"),
        (lambda: GroupLimitedRouter(8, 5, H, n_group=4, topk_group=2), "do not give each token 5 experts"),
        (lambda: ExpertMLPs(E, K, H, INNER, "silu", capacity_factor=0.0), "capacity_factor must be above 0"),
        (lambda: ExpertMLPs(E, K, H, INNER, "softplus"), "unknown activation 'softplus'"),
        (lambda: ExpertMLPs(E, K, H, INNER, "silu", return_bias=True), "return_bias=True is not supported"),
        (lambda: ExpertMLPs(E, K, H, INNER, "silu", block_sise=4), "unexpected keyword argument 'block_sise'"),
        (lambda: MoE(RouterTopK(4, 1, H), ExpertMLPs(E, K, H, INNER, "silu")), "give both the same numbers"),
        (
            lambda: MoE(RouterTopK(E, K, H), ExpertMLPs(E, K, H, INNER, "silu"), token_shuffle_group_size=2),
            "token_shuffle_group_size=2: tokens stay on their ranks",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(make, said):
    with pytest.raises((ParallelConfigError, TypeError), match=said):
        make()
