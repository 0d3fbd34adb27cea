"""``nxd::cache_attention`` against attention written out position by position in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nxd_infer.ops import cache_attention, masked_cache_attention

D = 4


def written_out(q, history, scale):
    """Attention of each query over ``history[i]``, the (keys, values) [t, KH, D] it may see; float64 [S, H, D]."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i, (keys, values) in enumerate(history):
        group = q.shape[1] // keys.shape[1]
        for head in range(q.shape[1]):
            scores = keys[:, head // group].double() @ q[i, head].double() * scale
            out[i, head] = scores.softmax(0) @ values[:, head // group].double()
    return out


def test_a_cache_of_eight_bits_stands_for_rounded_keys_and_values():
    generator = torch.Generator().manual_seed(0)
    q, k, v = random_step(generator, 1, 5, 4, 2)
    caches = [torch.full((2, 2, 6, D + 4), -1, dtype=torch.int8) for _ in "kv"]  # scales that are NaN
    start, length = torch.tensor([0]), torch.tensor([5])
    out = cache_attention(q, k, v, *caches, torch.tensor([[0]]), start, length, 0.5)
    rounded = []
    for x in (k, v):
        scale = x.abs().amax(-1, keepdim=True) / 127
        rounded.append((x / scale).round() * scale)
        assert 0 < (rounded[-1] - x).abs().max() <= scale.max() / 2 + 1e-6
    history = [(rounded[0][0, : i + 1], rounded[1][0, : i + 1]) for i in range(5)]
    assert torch.allclose(out[0].double(), written_out(q[0], history, 0.5), atol=1e-5)


def random_step(generator, rows, steps, heads, kv_heads, dtype=torch.float32):
    def draw(n):
        return torch.randn(rows, steps, n, D, generator=generator, dtype=dtype)

    return draw(heads), draw(kv_heads), draw(kv_heads)


@settings(max_examples=15)
@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    block_length=st.integers(2, 6),
    blocks_a_row=st.integers(1, 3),
    pieces=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    rows=st.integers(1, 3),
    seed=st.integers(0, 2**20),
)
def test_pieces_at_offsets_equal_attention_over_the_whole_context(
    kv_heads, group, block_length, blocks_a_row, pieces, rows, seed
):
    generator = torch.Generator().manual_seed(seed)
    heads, capacity = kv_heads * group, block_length * blocks_a_row
    blocks = rows * blocks_a_row + 1
    # what no row has written, or another request has left behind, must not be read
    k_cache, v_cache = (torch.full((blocks, kv_heads, block_length, D), float("nan")) for _ in "kv")
    order = torch.randperm(blocks - 1, generator=generator)
    table = order.view(rows, blocks_a_row)
    keys: list[list[torch.Tensor]] = [[] for _ in range(rows)]
    values: list[list[torch.Tensor]] = [[] for _ in range(rows)]
    scale = 1 / math.sqrt(D)
    for size in pieces:
        q, k, v = random_step(generator, rows, size, heads, kv_heads)
        start = torch.tensor([len(row) for row in keys])
        length = torch.minimum(torch.randint(0, size + 1, (rows,), generator=generator), capacity - start)
        out = cache_attention(q, k, v, k_cache, v_cache, table, start, length, scale)
        assert out.isfinite().all()
        for row in range(rows):
            seen = []
            for i in range(int(length[row])):
                keys[row].append(k[row, i])
                values[row].append(v[row, i])
                seen.append((torch.stack(keys[row]), torch.stack(values[row])))
            expected = written_out(q[row, : len(seen)], seen, scale)
            torch.testing.assert_close(out[row, : len(seen)].double(), expected, atol=2e-6, rtol=2e-6)


def test_writes_touch_the_live_positions_and_the_scratch_block_only():
    generator = torch.Generator().manual_seed(0)
    k_cache = torch.zeros(4, 2, 8, D)
    v_cache = torch.zeros(4, 2, 8, D)
    q, k, v = random_step(generator, 2, 3, 4, 2)
    cache_attention(
        q, k, v, k_cache, v_cache, torch.tensor([[2], [0]]), torch.tensor([5, 0]), torch.tensor([3, 2]), 0.5
    )
    expected = torch.zeros(3, 2, 8, D)
    expected[2, :, 5:8] = k[0].transpose(0, 1)
    expected[0, :, 0:2] = k[1, :2].transpose(0, 1)
    assert torch.equal(k_cache[:3], expected)
    assert torch.equal(k_cache[3, :, 2], k[1, 2]), "the write of padding goes to the scratch block"


def test_positions_beyond_the_blocks_are_padding_and_stay_finite():
    generator = torch.Generator().manual_seed(1)
    k_cache, v_cache = torch.zeros(2, 1, 4, D), torch.zeros(2, 1, 4, D)
    q, k, v = random_step(generator, 1, 6, 2, 1)
    out = cache_attention(q, k, v, k_cache, v_cache, torch.tensor([[0]]), torch.tensor([2]), torch.tensor([6]), 0.5)
    assert out.isfinite().all()
    assert torch.equal(k_cache[0, :, 2:4], k[0, :2].transpose(0, 1))
    assert not k_cache[0, :, :2].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    generator = torch.Generator().manual_seed(3)
    q, k, v = random_step(generator, 1, 5, 4, 2, dtype)
    caches = [torch.zeros(2, 2, 8, D, dtype=dtype) for _ in range(2)]
    out = cache_attention(q, k, v, *caches, torch.tensor([[0]]), torch.tensor([0]), torch.tensor([5]), 0.5)
    assert out.dtype == dtype
    expected = written_out(q[0], [(k[0, : i + 1], v[0, : i + 1]) for i in range(5)], 0.5)
    tolerance = {torch.bfloat16: 3e-2, torch.float16: 3e-3, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(out[0].double(), expected, atol=tolerance, rtol=tolerance)


def test_masks_caps_and_biases_change_the_scores_only():
    """Against scores written out, for a step of two rows at their own offsets."""
    generator = torch.Generator().manual_seed(5)
    B, S, H, KH, window, cap = 2, 3, 4, 2, 2, 0.5
    q, k, v = random_step(generator, B, S, H, KH)
    place = torch.tensor([[1], [0]]), torch.tensor([2, 4]), torch.tensor([3, 2])
    filled = [torch.randn(3, KH, 8, D, generator=generator) for _ in range(2)]
    plain, masked, empty = ([cache.clone() for cache in filled] for _ in range(3))
    expected = cache_attention(q, k, v, *plain, *place, 0.5)
    torch.testing.assert_close(masked_cache_attention(q, k, v, *masked, *place, 0.5), expected)
    assert all(torch.equal(a, b) for a, b in zip(plain, masked, strict=True))
    positions = place[1][:, None] + torch.arange(S)
    seen = torch.arange(8) > positions[:, :, None] - window
    bias = torch.randn(B, H, S, 8, generator=generator)
    found = masked_cache_attention(q, k, v, *empty, *place, 0.5, seen, cap, bias)
    for b in range(B):
        for s in range(int(place[2][b])):
            at = int(positions[b, s])
            keys, values = (cache[place[0][b, 0], :, at - window + 1 : at + 1] for cache in plain)
            for h in range(H):
                scores = torch.tanh(keys[h // 2] @ q[b, s, h] * 0.5 / cap) * cap
                scores = scores + bias[b, h, s, at - window + 1 : at + 1]
                torch.testing.assert_close(found[b, s, h], scores.softmax(-1) @ values[h // 2])
    assert found.isfinite().all()
