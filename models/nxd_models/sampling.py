"""What a request may ask of the next token, as pure functions over a batch: penalties, bias, allowed tokens, sampling.

In this order, for each row (the drawing itself is specified in :mod:`nxd_infer.ops.sampling`):

1. *repetition penalty* r: logits of tokens in the prompt or the output so far are divided by r where positive and
   multiplied by r where negative (as Hugging Face and vLLM do).
2. *presence* and *frequency penalty*: ``logit -= presence * (count > 0) + frequency * count`` over output tokens only.
3. *bias*: ``logit += value`` for the listed ids; an id listed twice adds twice, one outside the vocabulary is ignored.
4. *allowed tokens*: bit ``i % 32`` of word ``i // 32`` says whether token i may be chosen.
5. temperature, top-k, top-p, min-p, and the draw.

Log probabilities are of the *raw* distribution: the log-softmax of the model's logits before all five steps, as the
OpenAI API and vLLM report them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nxd_infer import ops
from nxd_infer.ops.sampling import GREEDY_BELOW, LOGPROB_FLOOR

TOP_LOGPROBS = 20

__all__ = ["GREEDY_BELOW", "LOGPROB_FLOOR", "TOP_LOGPROBS", "adjust", "allowed_words", "pack_allowed", "sample"]


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
    presence_penalty: Tensor | None = None,
    frequency_penalty: Tensor | None = None,
    repetition_penalty: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The next token of each row: ``(token [B], logprob [B], top_ids [B, 20], top_logprobs [B, 20])``.

    Args:
        logits_BV: raw logits; float32 is computed in.
        temperature_B, top_p_B, min_p_B: float32; off at 0 (greedy), 1 and 0. top_k_B: int64, off at 0.
        seed_B, position_B: int64; what the row's random numbers are a function of, besides the token id.
        allowed: int32 [B, ceil(V/32)] bits; bias_ids, bias_values: int64 and float32 [B, n].
        counts: [B, V] how often each token stands in the output so far; seen: bool [B, V] tokens of the prompt.
        presence_penalty, frequency_penalty, repetition_penalty: float32 [B]; off at 0, 0 and 1.
    """
    raw = logits_BV.float()
    logits = adjust(
        raw,
        allowed,
        bias_ids,
        bias_values,
        counts=counts,
        seen=seen,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
    )
    return ops.sample(logits, raw, temperature_B, top_k_B, top_p_B, min_p_B, seed_B, position_B, TOP_LOGPROBS)


def adjust(
    logits_BV: Tensor,
    allowed: Tensor | None = None,
    bias_ids: Tensor | None = None,
    bias_values: Tensor | None = None,
    *,
    counts: Tensor | None = None,
    seen: Tensor | None = None,
    presence_penalty: Tensor | None = None,
    frequency_penalty: Tensor | None = None,
    repetition_penalty: Tensor | None = None,
) -> Tensor:
    """Steps 1 to 4 of the module: the logits that are drawn from, float32 [B, V]. Arguments as in :func:`sample`."""
    logits = logits_BV
    vocabulary = logits.shape[-1]
    if repetition_penalty is not None:
        known = torch.zeros_like(logits, dtype=torch.bool) if seen is None else seen
        if counts is not None:
            known = known | (counts > 0)
        factor = repetition_penalty[:, None]
        logits = torch.where(known, torch.where(logits > 0, logits / factor, logits * factor), logits)
    if counts is not None and presence_penalty is not None:
        logits = logits - presence_penalty[:, None] * (counts > 0)
    if counts is not None and frequency_penalty is not None:
        logits = logits - frequency_penalty[:, None] * counts
    if bias_ids is not None and bias_values is not None:
        inside = (bias_ids >= 0) & (bias_ids < vocabulary)
        ids = torch.where(inside, bias_ids, 0)
        logits = logits.scatter_add(-1, ids, torch.where(inside, bias_values, 0.0))
    if allowed is not None:
        bit = torch.arange(32, dtype=torch.int32, device=logits.device)
        bits = (allowed[:, :, None] >> bit) & 1
        logits = torch.where(bits.flatten(1)[:, :vocabulary] > 0, logits, -torch.inf)
    return logits


def allowed_words(vocab_size: int) -> int:
    """int32 words of the bitmask of allowed tokens."""
    return -(-vocab_size // 32)


def pack_allowed(allowed_BV: Tensor) -> Tensor:
    """bool [B, V] -> the int32 bitmask [B, ceil(V/32)] that :func:`sample` takes."""
    rows, vocabulary = allowed_BV.shape
    words = allowed_words(vocabulary)
    padded = torch.nn.functional.pad(allowed_BV.long(), (0, words * 32 - vocabulary))
    value = (padded.view(rows, words, 32) << torch.arange(32)).sum(-1)
    return torch.where(value >= 2**31, value - 2**32, value).to(torch.int32)
