"""Adjust logits before sampling as requests ask, and count past tokens for the penalties.

Shapes use B rows, V vocabulary entries, S tokens per step and N slots. In this order, for each row:

1. *repetition penalty* r: logits of tokens in the prompt or the output so far are divided by r where positive and
   multiplied by r where negative (as Hugging Face and vLLM do).
2. *presence* and *frequency penalty*: ``logit -= presence * (count > 0)``, then ``logit -= frequency * count``, over
   output tokens only.
3. *bias*: ``logit += value`` for the listed ids in their order; duplicate ids add twice, ids outside the vocabulary are
   ignored.
4. *allowed tokens*: bit ``i % 32`` of word ``i // 32`` says whether token i may be chosen.

A row without adjustments costs nothing in the native operators.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nxd_infer.ops.composite import composite


def adjust_logits(
    logits_BV: Tensor,
    allowed: Tensor | None = None,
    bias_ids: Tensor | None = None,
    bias_values: Tensor | None = None,
    counts: Tensor | None = None,
    seen: Tensor | None = None,
    slot: Tensor | None = None,
    presence_penalty: Tensor | None = None,
    frequency_penalty: Tensor | None = None,
    repetition_penalty: Tensor | None = None,
) -> Tensor:
    """Apply steps 1 to 4 of the module docstring: return the logits to sample from, float32 [B, V].

    Args:
        logits_BV: float32.
        allowed: int32 [B, ceil(V/32)] bits; bias_ids, bias_values: int64 and float32 [B, n], both or neither.
        counts, seen: int32 and bool [N, V], how often each token occurs in the output so far, and whether it is in the
            prompt. Row b uses line ``slot[b]`` (int64 [B], in ``0 .. N-1``), or line b if ``slot`` is None.
        presence_penalty, frequency_penalty, repetition_penalty: float32 [B]; off at 0, 0 and 1.
    """
    logits = logits_BV
    vocabulary = logits.shape[-1]
    if slot is not None:
        counts = None if counts is None else counts.index_select(0, slot)
        seen = None if seen is None else seen.index_select(0, slot)
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


@composite(
    "remember_tokens(Tensor(a!) counts, Tensor(b!) seen, Tensor ids, Tensor output, Tensor start, Tensor length, "
    "Tensor slot) -> ()",
    lambda *arguments: None,
)
def remember_tokens(
    counts_NV: Tensor,
    seen_NV: Tensor,
    ids_BS: Tensor,
    output_BS: Tensor,
    start_B: Tensor,
    length_B: Tensor,
    slot_B: Tensor,
) -> None:
    """Record the tokens of a step in place, in line ``slot[b]`` for row b: increment ``counts`` for output tokens, set
    ``seen`` for prompt tokens.

    A row with ``start = 0`` resets its line; rows with the same slot are pieces of one sequence. Tokens past ``length``
    are not counted, and a row of length 0 changes nothing. The last line is scratch: no live row may use it, and its
    content is meaningless.

    Args:
        counts_NV, seen_NV: int32 and bool, modified in place.
        ids_BS: int64 in ``0 .. V-1``; output_BS: bool. start_B, length_B, slot_B: int64.
    """
    scratch = counts_NV.shape[0] - 1  # also for uncounted tokens
    slot_B = torch.where(length_B > 0, slot_B, scratch)
    fresh_B = torch.where(start_B == 0, slot_B, scratch)
    torch.ops.aten.index_put_(counts_NV, [fresh_B], torch.zeros_like(counts_NV[0]))
    torch.ops.aten.index_put_(seen_NV, [fresh_B], torch.zeros_like(seen_NV[0]))
    live_BS = torch.arange(ids_BS.shape[1], device=ids_BS.device) < length_B[:, None]
    counted_BS = torch.where(live_BS & output_BS, slot_B[:, None], scratch)
    prompted_BS = torch.where(live_BS & ~output_BS, slot_B[:, None], scratch)
    torch.ops.aten.index_put_(counts_NV, [counted_BS, ids_BS], torch.ones_like(ids_BS, dtype=torch.int32), True)
    torch.ops.aten.index_put_(seen_NV, [prompted_BS, ids_BS], torch.ones_like(ids_BS, dtype=torch.bool))
