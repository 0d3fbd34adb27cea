"""Sample tokens: truncation by exact thresholds without a sort, and counter-based random numbers.

Shapes use B rows and V vocabulary entries. Rows are independent: a result depends on the row's logits and settings, on
``(seed, position)`` and on token ids, never on the index in the batch, the batch size or the tensor-parallel degree.

Definitions, for the logits ``x`` of a row:

1. ``temperature < 1e-5`` (or not a number) is greedy: the first largest logit. Otherwise
   ``s = (x - max x) / temperature`` and ``p = softmax(s)``.
2. *top-k* keeps the k largest ``s``, and all ties with the smallest of them; ``k <= 0`` keeps all.
3. *top-p* keeps the smallest set of largest ``p``, renormalised over what top-k kept, whose sum reaches ``top_p``, and
   all ties with the smallest of them; ``top_p >= 1`` keeps all, ``top_p <= 0`` keeps the largest.
4. *min-p* keeps tokens with ``p >= min_p * max p``; ``min_p <= 0`` keeps all.
5. The token is ``argmax(s - log(-log1p(-u)))`` over the tokens that all three keep (the Gumbel-max trick), with ``u``
   uniform in (0, 1) from ``(seed, position, token id)``: a draw from ``p`` restricted to them.

A NaN logit counts as minus infinity, plus infinity as the largest finite number, so even a damaged row gives a valid
token. Among equal scores, and among equal log probabilities, the lowest id comes first.

Every implementation samples the same tokens, bit-equal up to the score: ``s`` is one subtraction and one division in
float32; ``exp`` in the sums of top-p is :func:`exp_negative`, which specifies each rounding; the random bits are
integers. Scores are float64: logarithms of two libraries could change a sample only if two scores agree to 15 digits.
Log probabilities are equal to about 1e-6.

The order (temperature, top-k, top-p, min-p) is that of Hugging Face, which breaks ties by sort order; we keep all ties.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nxd_infer.ops.adjust import adjust_logits
from nxd_infer.ops.composite import composite

GREEDY_BELOW = 1e-5
"""Below this temperature the likeliest token is taken."""
LOGPROB_FLOOR = -9999.0
"""Reported instead of minus infinity, so that results can be represented in JSON."""


def _fake(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, top = logits.shape[0], next(each for each in arguments if isinstance(each, int))
    token = logits.new_empty(rows, dtype=torch.int64)
    return token, logits.new_empty(rows), token.new_empty(rows, top), logits.new_empty(rows, top)


@composite(
    "sample_adjusted(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, "
    "Tensor position, int top, Tensor? allowed, Tensor? bias_ids, Tensor? bias_values, Tensor? counts, Tensor? seen, "
    "Tensor? slot, Tensor? presence_penalty, Tensor? frequency_penalty, Tensor? repetition_penalty) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    _fake,
)
def sample_adjusted(
    logits_BV: Tensor,
    temperature_B: Tensor,
    top_k_B: Tensor,
    top_p_B: Tensor,
    min_p_B: Tensor,
    seed_B: Tensor,
    position_B: Tensor,
    top: int = 20,
    allowed: Tensor | None = None,
    bias_ids: Tensor | None = None,
    bias_values: Tensor | None = None,
    counts: Tensor | None = None,
    seen: Tensor | None = None,
    slot: Tensor | None = None,
    presence_penalty: Tensor | None = None,
    frequency_penalty: Tensor | None = None,
    repetition_penalty: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sample one token per row as the module docstring defines, from ``logits`` after
    :func:`~nxd_infer.ops.adjust.adjust_logits`, whose arguments come last.

    One operator, so that rows without adjustments are sampled without a copy.

    Args:
        logits_BV: float32; log probabilities are of these.
        temperature_B, top_p_B, min_p_B: float32. top_k_B, seed_B, position_B: int64.
        top: how many of the most probable tokens to report.

    Returns:
        token [B] int64; its natural log probability [B] float32; the ids [B, top] int64 and the log probabilities
        [B, top] float32 of the most probable tokens, best first. If the vocabulary is smaller than ``top``, the rest
        has id -1 and the floor. Log probabilities are never below ``LOGPROB_FLOOR``.
    """
    adjusted = adjust_logits(
        logits_BV,
        allowed,
        bias_ids,
        bias_values,
        counts,
        seen,
        slot,
        presence_penalty,
        frequency_penalty,
        repetition_penalty,
    )
    logits_BV, raw_BV = finite_or_absent(adjusted), finite_or_absent(logits_BV)
    hot_B = temperature_B >= GREEDY_BELOW  # False for NaN
    scale_B1 = torch.where(hot_B, temperature_B, 1.0).clamp(max=1e30)[:, None]
    largest_B1 = logits_BV.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    cost_BV = (largest_B1 - logits_BV) / scale_B1
    keep_BV = truncation(cost_BV, top_k_B, top_p_B, min_p_B)
    noise_BV = uniform(seed_B, position_B, logits_BV.shape[-1])
    score_BV = -cost_BV.double() - torch.log(-torch.log1p(-noise_BV))
    drawn_BV = torch.where(keep_BV, score_BV, -torch.inf)
    token_B = torch.where(hot_B[:, None], drawn_BV, logits_BV.double()).argmax(-1)
    return (token_B, *logprobs(raw_BV, token_B, top))


def finite_or_absent(logits: Tensor) -> Tensor:
    """Replace NaN by minus infinity, and plus infinity by the largest finite number."""
    return torch.where(logits.isnan(), -torch.inf, logits).clamp(max=torch.finfo(torch.float32).max)


def logprobs(raw_BV: Tensor, token_B: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log probabilities of ``token`` and of the ``top`` most probable tokens; see :func:`sample_adjusted`."""
    count = min(top, raw_BV.shape[-1])
    total_B1 = raw_BV.logsumexp(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    chosen_B = (raw_BV.gather(-1, token_B[:, None]) - total_B1)[:, 0].clamp(min=LOGPROB_FLOOR)
    ids = largest_first(raw_BV, count)
    values = (raw_BV.gather(-1, ids) - total_B1).clamp(min=LOGPROB_FLOOR)
    if count < top:
        values = torch.nn.functional.pad(values, (0, top - count), value=LOGPROB_FLOOR)
        ids = torch.nn.functional.pad(ids, (0, top - count), value=-1)
    return chosen_B, ids, values


def largest_first(raw_BV: Tensor, count: int) -> Tensor:
    """Return the ids [B, count] of the largest entries, without NaN; unlike ``topk``, ties by lowest id first."""
    bits_BV = torch.where(raw_BV == 0, 0.0, raw_BV).view(torch.int32)  # no negative zero
    order_BV = (bits_BV ^ ((bits_BV >> 31) & 0x7FFFFFFF)).long()  # same order as the floats
    ids_V = torch.arange(raw_BV.shape[-1], device=raw_BV.device)
    keys = ((order_BV << 32) + (_MASK - ids_V)).topk(count, dim=-1).values
    return _MASK - (keys & _MASK)


# --- truncation ---------------------------------------------------------------------------------------


def truncation(cost_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor) -> Tensor:
    """Return which tokens top-k, top-p and min-p all keep, as bool [B, V].

    ``cost`` is ``-s`` of the module docstring: zero for the best token of a row, infinite for an excluded one.
    """
    vocabulary = cost_BV.shape[-1]
    # Non-negative floats sort like their bits, so a threshold is found digit by digit, exactly.
    bits_BV = cost_BV.view(torch.int32)
    one = torch.ones((), dtype=torch.float64, device=cost_BV.device)
    wanted_B = torch.where(top_k_B > 0, top_k_B, vocabulary).clamp(max=vocabulary)
    by_k_B = smallest_threshold(bits_BV, one, wanted_B.double())

    # Integers in float64 add exactly in any order: the threshold does not depend on how a sum is split.
    mass_BV = (exp_negative(-cost_BV).double() * 2.0**32).floor()
    mass_BV = torch.where(bits_BV <= by_k_B[:, None], mass_BV, 0.0)
    share_B = torch.where(top_p_B < 1.0, top_p_B, 1.0).clamp(min=0.0).double()
    target_B = (share_B * mass_BV.sum(-1)).clamp(min=1.0)
    by_p_B = torch.where(top_p_B < 1.0, smallest_threshold(bits_BV, mass_BV, target_B), by_k_B)

    limit_B = torch.where(min_p_B > 0.0, -torch.log(min_p_B.clamp(1e-38, 1.0).double()).float(), torch.inf)
    kept_BV = (bits_BV <= torch.minimum(by_k_B, by_p_B)[:, None]) & (cost_BV <= limit_B[:, None])
    return kept_BV & (cost_BV < torch.inf)


def exp_negative(x: Tensor) -> Tensor:
    """Return exp(x) of a float32 x <= 0, bit-equal everywhere; 0 at -87 and below, relative error below 1.2e-7.

    Cephes' expf (Moshier): ``exp(x) = 2^n exp(r)``, ``r = x - n log 2`` in two parts, and a polynomial of degree 7.
    """
    inside = x.clamp(min=-87.0)
    n = (inside * 1.44269504088896341 + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds to an integer
    r = (inside - n * 0.693359375) - n * -2.12194440e-4
    y = 1.9875691500e-4
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = y * r + coefficient
    y = (y * (r * r) + r) + 1.0
    power = ((n.to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(x > -87.0, y * power, 0.0)


_WIDTHS = (11, 10, 10)
"""Bits determined by each histogram; the sign bit of a cost is 0, so 31 remain."""


def smallest_threshold(bits_BV: Tensor, weight: Tensor, target_B: Tensor) -> Tensor:
    """Return the smallest int32 ``t`` [B] with ``sum(weight where bits <= t) >= target``; if none, one above all bits.

    ``bits`` are non-negative int32; ``weight`` is float64, a scalar or [B, V]. A radix search: each histogram
    determines the next bits of ``t`` among the entries with the same leading bits.
    """
    rows, _ = bits_BV.shape
    found_B = torch.zeros(rows, dtype=torch.int32, device=bits_BV.device)
    rest_B, high = target_B, sum(_WIDTHS)
    for width in _WIDTHS:
        low, last = high - width, (1 << width) - 1
        digit_BV = (bits_BV >> low) - (found_B >> low)[:, None]
        inside_BV = (digit_BV >= 0) & (digit_BV <= last)
        counted_BV = torch.where(inside_BV, weight, 0.0)
        histogram = torch.zeros(rows, last + 1, dtype=torch.float64, device=bits_BV.device)
        sums = histogram.scatter_add(1, torch.where(inside_BV, digit_BV, 0).long(), counted_BV).cumsum(-1)
        bin_B = (sums < rest_B[:, None]).sum(-1).clamp(max=last)
        below_B = sums.gather(1, (bin_B - 1).clamp(min=0)[:, None])[:, 0]
        rest_B = rest_B - torch.where(bin_B > 0, below_B, 0.0)
        found_B = found_B + (bin_B << low).int()
        high = low
    return found_B


# --- random numbers -----------------------------------------------------------------------------------

_MASK = 0xFFFFFFFF
# Odd multipliers below 2^31: a 32-bit value times one of them stays within int64.
_M1, _M2, _M3 = 0x7FEB352D, 0x2C1B3C6D, 0x297A2D39
_GOLDEN = 0x1E3779B9


def _mix(x: Tensor) -> Tensor:
    """Mix bits: a bijection of 32-bit values (in int64) in which every input bit affects every output bit."""
    x = ((x ^ (x >> 16)) * _M1) & _MASK
    x = ((x ^ (x >> 15)) * _M2) & _MASK
    x = ((x ^ (x >> 12)) * _M3) & _MASK
    return x ^ (x >> 15)


def random_bits(seed_B: Tensor, position_B: Tensor, vocabulary: int) -> Tensor:
    """Return 32 random bits per token, int64 [B, V] in 0 .. 2^32-1, a pure function of (seed, position, token id).

    Uses all 64 bits of the seed and the low 32 of the position.
    """
    low_B, high_B = seed_B & _MASK, (seed_B >> 32) & _MASK
    key_B = _mix(_mix(low_B) ^ ((high_B + _GOLDEN) & _MASK))
    first_B = _mix((key_B + (position_B & _MASK) * _GOLDEN) & _MASK)
    second_B = _mix(first_B ^ high_B ^ _M3)
    ids_V = torch.arange(vocabulary, dtype=torch.int64, device=seed_B.device)
    token_V = _mix(((ids_V + 1) * _GOLDEN) & _MASK)
    x = token_V ^ first_B[:, None]
    x = ((x ^ (x >> 16)) * _M1) & _MASK
    # The second key is added after the first product, so that no two rows share a pattern over token ids.
    x = (x + second_B[:, None]) & _MASK
    x = ((x ^ (x >> 15)) * _M2) & _MASK
    x = ((x ^ (x >> 12)) * _M3) & _MASK
    return x ^ (x >> 15)


def uniform(seed_B: Tensor, position_B: Tensor, vocabulary: int) -> Tensor:
    """Return uniform float64 [B, V] in (0, 1): exactly ``(bits + 1/2) / 2^32`` of :func:`random_bits`."""
    return (random_bits(seed_B, position_B, vocabulary).double() + 0.5) * 2.0**-32
