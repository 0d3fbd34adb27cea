"""Attention and rotary embeddings of ``neuronx_distributed``, against naive ones in float64 and transformers'."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.models.llama import modeling_llama
from transformers.models.llama4 import modeling_llama4

from nxd_infer.compat.attention import (
    apply_rotary_polar_compatible,
    apply_rotary_pos_emb,
    nki_flash_attn_func,
    nki_ring_attn_func,
    precompute_freqs_cis,
)
from nxd_infer.errors import InputMismatchError, ParallelConfigError


def naive(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_flash_attention(heads: int, causal: bool, turned: bool):
    q, k, v = random(2, 4, 6, 8), random(2, heads, 6, 8), random(2, heads, 6, 8)
    given = [one.transpose(-1, -2) if turned else one for one in (q, k, v)]
    result = nki_flash_attn_func(*given, causal=causal, softmax_scale=0.3, transpose_nki_inputs=turned, lnc=2)
    expected = naive(q, k, v, 0.3, causal)
    assert result.shape == (2, 4, 6, 8) and torch.allclose(result, expected, rtol=1e-12)
    weights = torch.randn_like(expected)
    found, wanted = (torch.autograd.grad((one * weights).sum(), (q, k, v)) for one in (result, expected))
    assert all(map(torch.allclose, found, wanted))


def test_flash_attention_by_place_and_with_dropout():
    q, k, v = (random(1, 2, 4, 5).transpose(-1, -2) for _ in range(3))
    plain = nki_flash_attn_func(q, k, v)
    assert torch.allclose(plain, naive(*(one.transpose(-1, -2) for one in (q, k, v)), 1 / math.sqrt(5), True))
    for call in ((1, 0.0, None, True), (0.0, None, True)):  # of later and of earlier versions
        assert torch.equal(nki_flash_attn_func(q, k, v, *call), plain)
    dropped = [nki_flash_attn_func(q, k, v, dropout_p=0.5, seed=seed) for seed in (1, torch.tensor([1]), 2)]
    assert torch.equal(dropped[0], dropped[1]) and not torch.equal(dropped[0], dropped[2])
    with pytest.raises(InputMismatchError, match=r"k \(1, 3, 4, 5\)"):
        nki_flash_attn_func(q, *(random(1, 3, 5, 4) for _ in range(2)))


def test_ring_attention_of_one_rank():
    q, k, v = random(2, 4, 6, 8), random(2, 2, 6, 8), random(2, 2, 6, 8)
    for causal in (True, False):
        result = nki_ring_attn_func(q, k, v, 0, [[0, 0]], causal=causal)
        assert torch.allclose(result, naive(q, k, v, 8**-0.5, causal))
    with pytest.raises(ParallelConfigError, match="rank_id is 1, but this is context parallel rank 0"):
        nki_ring_attn_func(q, k, v, 1)


def test_rotary_embeddings_equal_llamas():
    q, k, angles = random(2, 4, 6, 8), random(2, 2, 6, 8), torch.rand(2, 6, 4, dtype=torch.float64).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    expected = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    assert all(map(torch.equal, apply_rotary_pos_emb(q, k, cos, sin), expected))
    turned = apply_rotary_pos_emb(q.transpose(2, 3), k.transpose(2, 3), cos, sin, None, True, True)
    assert all(torch.equal(one.transpose(2, 3), other) for one, other in zip(turned, expected, strict=True))
    tables = (torch.cat([torch.zeros(3, 8).double(), one[0]]) for one in (cos, sin))
    places = torch.arange(3, 9).expand(2, -1)
    by_place = apply_rotary_pos_emb(q, k, *tables, places)
    assert torch.equal(by_place[0][0], expected[0][0])


def test_rotary_embeddings_of_neighbours_equal_llama_4s():
    q, k = torch.randn(2, 6, 4, 8), torch.randn(2, 6, 2, 8)
    angles = precompute_freqs_cis(8, 12, 500.0)[torch.arange(3, 9).expand(2, -1)]
    expected = modeling_llama4.apply_rotary_emb(q, k, torch.polar(torch.ones_like(angles), angles))
    for one, other in zip(apply_rotary_polar_compatible(q, k, angles), expected, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    with pytest.raises(InputMismatchError, match="float32"):
        apply_rotary_polar_compatible(q, k, angles.double())


def test_scaled_frequencies_are_llama_3s():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=128, num_attention_heads=1, head_dim=128, rope_parameters=rope)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    assert torch.allclose(precompute_freqs_cis(128, 2, 500000.0, True)[1], expected, rtol=1e-5)
