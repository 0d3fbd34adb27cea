"""Choose the next token as a request asks: penalties, bias, allowed tokens, sampling, and 20 log probabilities.

Steps 1 to 4 are specified in :mod:`nxd_infer.ops.adjust` (repetition penalty, presence and frequency penalty, bias,
allowed tokens, in this order), step 5 in :mod:`nxd_infer.ops.sampling` (temperature, top-k, top-p, min-p, the draw).

Log probabilities are of the *raw* distribution: the log-softmax of the model's logits before all five steps, as the
OpenAI API and vLLM report them.
"""

from __future__ import annotations

from torch import Tensor

from nxd_infer import ops
from nxd_infer.ops.sampling import GREEDY_BELOW, LOGPROB_FLOOR

TOP_LOGPROBS = 20

__all__ = ["GREEDY_BELOW", "LOGPROB_FLOOR", "TOP_LOGPROBS", "allowed_words", "sample"]


def sample(
    logits_BV: Tensor,
    temperature_B: Tensor,
    top_k_B: Tensor,
    top_p_B: Tensor,
    min_p_B: Tensor,
    seed_B: Tensor,
    position_B: Tensor,
    allowed: Tensor | None = None,
    bias_ids: Tensor | None = None,
    bias_values: Tensor | None = None,
    *,
    counts: Tensor | None = None,
    seen: Tensor | None = None,
    slot: Tensor | None = None,
    presence_penalty: Tensor | None = None,
    frequency_penalty: Tensor | None = None,
    repetition_penalty: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the next token of each row: ``(token [B], logprob [B], top_ids [B, 20], top_logprobs [B, 20])``.

    Args:
        logits_BV: raw logits; the computation is in float32.
        temperature_B, top_p_B, min_p_B: float32; off at 0 (greedy), 1 and 0. top_k_B: int64, off at 0.
        seed_B, position_B: int64; with the token id, they determine the row's random numbers.
        allowed, bias_ids, bias_values, counts, seen, slot, presence_penalty, frequency_penalty, repetition_penalty:
            as in :func:`nxd_infer.ops.adjust_logits`.
    """
    return ops.sample_adjusted(
        logits_BV.float(),
        temperature_B,
        top_k_B,
        top_p_B,
        min_p_B,
        seed_B,
        position_B,
        TOP_LOGPROBS,
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


def allowed_words(vocab_size: int) -> int:
    """Return the number of int32 words of the bitmask of allowed tokens."""
    return -(-vocab_size // 32)
