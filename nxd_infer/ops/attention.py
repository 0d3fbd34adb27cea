"""Attention over a KV cache that stays on the rank: write the new entries, then attend.

One operator serves decode (S = 1), prefill (start = 0), chunked prefill and verification of drafts (S > 1 at an
offset). Shapes use B rows, S positions, H query heads, KH key/value heads, D head dimension, N blocks of L positions,
n blocks per row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nxd_infer.ops.composite import composite
from nxd_infer.ops.packed import SCALE_BYTES, packed_shape, quantize


@composite(
    "cache_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor block_table, "
    "Tensor start, Tensor length, float scale) -> Tensor",
    lambda q, *others: q.new_empty(q.shape),
)
def cache_attention(
    q_BSHD: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    k_cache_NKLD: Tensor,
    v_cache_NKLD: Tensor,
    block_table_Bn: Tensor,
    start_B: Tensor,
    length_B: Tensor,
    scale: float,
) -> Tensor:
    """Write keys and values into the caches in place, then attend causally. Returns [B, S, H, D].

    Row b has positions ``start[b] .. start[b] + length[b] - 1``; position p is in block ``block_table[b, p // L]`` at
    ``p % L``. Query i attends to positions ``<= start[b] + i``. Query head h reads key/value head ``h // (H / KH)``.

    Queries past ``length``, and positions outside the row's blocks, are padding: their keys and values go to the last
    block (the scratch block, which no row may own) or nowhere, and their results are finite but meaningless. Cache
    contents outside a row's live positions, even NaN, do not affect that row.

    The native operator of this name reads only live positions. A row's results are bit-equal whatever the other rows
    and the number of threads, and with up to 16 queries per row, a query's result is bit-equal to that of a separate
    call. It rejects shapes and values that do not fit (RuntimeError, before anything is written), but does not check
    the blocks of positions that are not live.

    Args:
        q_BSHD, k_BSKD, v_BSKD: rotated queries, rotated keys, values.
        k_cache_NKLD, v_cache_NKLD: modified in place; same dtype as ``k`` and ``v``. Or int8 [N, KH, L, D + 4]: of each
            position and head D numbers ``q`` and a float32 ``scale = max|k| / 127``, which stand for ``q * scale``.
        block_table_Bn, start_B, length_B: int64. Blocks in ``0 .. N-1``, ``start >= 0``, ``0 <= length <= S``.
        scale: factor of the scores, usually ``D ** -0.5``.
    """
    where = (k_cache_NKLD, v_cache_NKLD, block_table_Bn, start_B, length_B)
    keys, values, mask_BST = _store(q_BSHD, k_BSKD, v_BSKD, *where)
    folded, mask = _folded(q_BSHD, mask_BST, keys.shape[1])
    keys, values = keys.to(folded.dtype), values.to(folded.dtype)
    return _unfolded(F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale), q_BSHD)


def masked_cache_attention(
    q_BSHD: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    k_cache_NKLD: Tensor,
    v_cache_NKLD: Tensor,
    block_table_Bn: Tensor,
    start_B: Tensor,
    length_B: Tensor,
    scale: float,
    visible_BST: Tensor | None = None,
    softcap: float | None = None,
    bias_BHST: Tensor | None = None,
) -> Tensor:
    """:func:`cache_attention` that no backend has an operator for: always in plain PyTorch, and slower.

    ``visible``: bool [B, S, n * L], which of the positions up to its own a query sees. ``softcap``: scores become
    ``softcap * tanh(score / softcap)``. ``bias``: [B, H, S, n * L], added to the scores last.
    """
    where = (k_cache_NKLD, v_cache_NKLD, block_table_Bn, start_B, length_B)
    keys, values, mask_BST = _store(q_BSHD, k_BSKD, v_BSKD, *where)
    if visible_BST is not None:
        mask_BST = mask_BST & visible_BST
    folded, mask = _folded(q_BSHD, mask_BST, keys.shape[1])
    scores = torch.matmul(folded, keys.to(folded.dtype).transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias_BHST is not None:
        scores = scores + bias_BHST.reshape(scores.shape)
    # The lowest finite number, not -inf: a padding query may see nothing, and must not become NaN.
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return _unfolded(torch.matmul(scores.softmax(-1).to(folded.dtype), values.to(folded.dtype)), q_BSHD)


def _store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    start: Tensor,
    length: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write keys and values; return each row's [B, KH, T, D] of them, T = n * L, and the causal mask [B, S, T]."""
    B, S = q.shape[:2]
    N, _, L, _ = k_cache.shape
    n = block_table.shape[1]

    step_S = torch.arange(S, device=q.device)
    position_BS = start[:, None] + step_S
    live_BS = (step_S < length[:, None]) & (position_BS < n * L)
    if n == 1:
        own_BS = block_table.expand(B, S)
        offset_BS = position_BS.clamp(0, L - 1)
    else:
        own_BS = block_table.gather(1, (position_BS // L).clamp(0, n - 1))
        offset_BS = position_BS % L
    block_BS = torch.where(live_BS, own_BS, N - 1)
    # One index_put_ per cache: it survives export and lowering as an in-place write of B*S entries.
    for cache, new in ((k_cache, k), (v_cache, v)):
        entries = _rounded(new) if cache.dtype == torch.int8 else new.to(cache.dtype)
        torch.ops.aten.index_put_(cache, [block_BS, None, offset_BS], entries)

    # Entries past the live ones are stale, perhaps from another request; masking only the scores would let NaN through.
    T = n * L
    past_T = torch.arange(T, device=q.device)
    end_B = (start + length).clamp(max=T)
    stale_B1T1 = (past_T >= end_B[:, None])[:, None, :, None]
    keys = _rows(k_cache, block_table).masked_fill(stale_B1T1, 0.0)
    values = _rows(v_cache, block_table).masked_fill(stale_B1T1, 0.0)
    return keys, values, past_T <= position_BS[:, :, None]


def _folded(q: Tensor, mask_BST: Tensor, KH: int) -> tuple[Tensor, Tensor]:
    """Fold the group into the queries: [B, KH, G*S, D], and the mask. Expanding keys (enable_gqa) costs 4 to 8x."""
    B, S, H, D = q.shape
    G, T = H // KH, mask_BST.shape[-1]
    folded = q.reshape(B, S, KH, G, D).permute(0, 2, 3, 1, 4).reshape(B, KH, G * S, D)
    return folded, mask_BST[:, None, None].expand(B, 1, G, S, T).reshape(B, 1, G * S, T)


def _unfolded(out: Tensor, q: Tensor) -> Tensor:
    B, S, H, D = q.shape
    KH = out.shape[1]
    return out.reshape(B, KH, H // KH, S, D).permute(0, 3, 1, 2, 4).reshape(B, S, H, D)


def _rows(cache_NKLD: Tensor, block_table_Bn: Tensor) -> Tensor:
    """Return each row's blocks concatenated: [B, KH, n*L, D]."""
    B, n = block_table_Bn.shape
    _, KH, L, D = cache_NKLD.shape
    if n == 1:
        rows = cache_NKLD.index_select(0, block_table_Bn[:, 0])
    else:
        rows = cache_NKLD[block_table_Bn].permute(0, 2, 1, 3, 4).reshape(B, KH, n * L, D)
    return _widened(rows) if rows.dtype == torch.int8 else rows


def cache_shape(N: int, KH: int, L: int, D: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the shape of a cache of ``dtype``, for ``D`` numbers per position and head."""
    return tuple(packed_shape([N, KH, L, D])) if dtype == torch.int8 else (N, KH, L, D)


def _rounded(x: Tensor) -> Tensor:
    """Return the entries [..., D + 4] of an int8 cache for ``x`` [..., D]."""
    q, scale = quantize(x)
    return torch.cat([q, scale[..., None].contiguous().view(torch.int8)], -1)


def _widened(entries: Tensor) -> Tensor:
    """Return the numbers [..., D] in float32 that entries of an int8 cache stand for."""
    # A copy: bytes may lie at any address, and floats not.
    scale = entries[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return entries[..., :-SCALE_BYTES].float() * scale
