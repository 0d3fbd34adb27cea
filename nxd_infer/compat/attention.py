"""Attention and rotary embeddings under the names of ``neuronx_distributed``, computed by PyTorch on any device.

Shapes: b sequences, h heads, s positions, d features of a head.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nxd_infer.context import current_context
from nxd_infer.errors import InputMismatchError, ParallelConfigError
from nxd_infer.util.also_called import also_called


@also_called(
    "q k v lnc dropout_p softmax_scale causal mixed_precision seed hardware_type transpose_nki_inputs",
    when=lambda given: len(given) > 3 and isinstance(given[3], int),
    ignored="lnc hardware_type",
)
def nki_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = True,
    mixed_precision: bool = True,
    seed: int | Tensor | None = None,
    transpose_nki_inputs: bool = True,
) -> Tensor:
    """Return causal attention [b, h, s, d] of inputs [b, h, d, s].

    With ``transpose_nki_inputs=False`` inputs are [b, h, s, d], too. ``k`` and ``v`` may have fewer heads, which must
    divide those of ``q``. ``softmax_scale`` None: ``d ** -0.5``. ``seed``: of the dropout; None draws from the default
    generator. ``mixed_precision``: no effect, softmax is in float32 at least.
    """
    if transpose_nki_inputs:
        q, k, v = (one.transpose(-1, -2) for one in (q, k, v))
    return _attention(q, k, v, dropout_p, softmax_scale, seed, is_causal=bool(causal))


@also_called(ignored="lnc hardware_type")
def nki_ring_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank_id: int | None = None,
    src_tgt_pairs: Any = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = True,
    mixed_precision: bool = True,
    seed: int | Tensor | None = None,
    transpose_nki_inputs: bool = False,
) -> Tensor:
    """Return this rank's piece of attention over a sequence that the context parallel ranks share, in order.

    Each rank gives, and gets, its own s positions: [b, h, s, d]. ``rank_id`` is this rank's place among them.
    ``src_tgt_pairs``: no effect, keys and values are gathered. The rest is as in :func:`nki_flash_attn_func`.
    """
    from nxd_infer.parallel_layers.mappings import gather_from_sequence_parallel_region

    cp = current_context().cp
    if rank_id is not None and int(rank_id) != cp.rank:
        raise ParallelConfigError(f"rank_id is {rank_id}, but this is context parallel rank {cp.rank}")
    if transpose_nki_inputs:
        q, k, v = (one.transpose(-1, -2) for one in (q, k, v))
    k, v = (gather_from_sequence_parallel_region(one, 2, process_group="cp") for one in (k, v))
    mask = None
    if causal:
        places = torch.arange(k.shape[2], device=q.device)
        mask = places <= places[cp.rank * q.shape[2] :][: q.shape[2], None]
    return _attention(q, k, v, dropout_p, softmax_scale, seed, attn_mask=mask)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, scale: float | None, seed: Any, **mask: Any
) -> Tensor:
    if q.dim() != 4 or k.shape != v.shape or q.shape[-1] != k.shape[-1] or q.shape[1] % k.shape[1]:
        shapes = ", ".join(f"{name} {tuple(one.shape)}" for name, one in (("q", q), ("k", k), ("v", v)))
        raise InputMismatchError(f"attention takes tensors [b, h, s, d] of one d, and heads that divide; got {shapes}")
    with contextlib.ExitStack() as drawn:
        if dropout_p and seed is not None:
            drawn.enter_context(torch.random.fork_rng())
            torch.manual_seed(int(seed))
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout_p, scale=scale, enable_gqa=q.shape[1] != k.shape[1], **mask
        )


# --- rotary embeddings --------------------------------------------------------------------------------


def apply_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    flash_attn: bool = False,
    transpose_nki_inputs: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return rotated queries and keys [b, h, s, d]; with ``flash_attn`` and ``transpose_nki_inputs``, [b, h, d, s].

    ``cos`` and ``sin`` are [b, s, d], or with ``position_ids`` [b, s] tables [positions, d].
    """
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    dim = -2 if flash_attn and transpose_nki_inputs else -1
    cos, sin = (one.unsqueeze(1).transpose(-1, dim) for one in (cos, sin))
    halves = (one.chunk(2, dim) for one in (q, k))
    turned = [torch.cat((-second, first), dim) for first, second in halves]
    return q * cos + turned[0] * sin, k * cos + turned[1] * sin


def precompute_freqs_cis(
    dim: int, end: int, theta: float = 10000.0, use_scaled: bool = False, device: torch.device | str | None = None
) -> Tensor:
    """Return the angles [end, dim / 2], float32, of :func:`apply_rotary_polar_compatible`.

    ``use_scaled``: Llama 3.1's, where frequencies below one turn in 8192 positions are eight times slower, and those
    up to four turns in part.
    """
    frequencies = theta ** -(torch.arange(0, dim, 2, device=device).float() / dim)
    if use_scaled:
        own = ((8192 * frequencies / (2 * math.pi) - 1) / 3).clamp(0, 1)
        frequencies = frequencies * (own + (1 - own) / 8)
    return torch.outer(torch.arange(end, device=frequencies.device).float(), frequencies)


def apply_rotary_polar_compatible(query: Tensor, key: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Return rotated queries and keys [b, s, h, d], whose pairs are neighbours, by angles [b, s, d / 2] or [s, d / 2].

    Raises InputMismatchError unless the angles are float32.
    """
    if freqs_cis.dtype != torch.float32:
        raise InputMismatchError(f"freqs_cis must be float32, got {freqs_cis.dtype}")
    cos, sin = freqs_cis.cos().unsqueeze(-2), freqs_cis.sin().unsqueeze(-2)

    def rotate(x: Tensor) -> Tensor:
        real, imaginary = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        pairs = torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), -1)
        return pairs.flatten(-2).to(x.dtype)

    return rotate(query), rotate(key)
