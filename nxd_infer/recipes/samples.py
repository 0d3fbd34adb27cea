"""A text that a model in training writes, to look at."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from nxd_server.text.tokenizer import Tokenizer

PROMPT = 16
"""Tokens of the validation data that a sample begins with."""
PIECE = 64
"""Its length is a multiple of this, so that it divides over the ranks."""


@torch.no_grad()
def sample(model: nn.Module, model_dir: Path, ids: Tensor, count: int, device: torch.device) -> str:
    """Return the start of ``ids`` and ``count`` further tokens, the likeliest each, as text. Every rank calls it."""
    training = model.training
    model.eval()
    begin = min(PROMPT, len(ids))
    known = torch.zeros(1, -(-(begin + count) // PIECE) * PIECE, dtype=torch.int64, device=device)
    known[0, :begin] = ids[:begin]  # a causal model does not see the zeros after it
    try:
        for place in range(begin, begin + count):
            known[0, place] = model(known)[0, place - 1].argmax()
    finally:
        model.train(training)
    found = known[0, : begin + count].tolist()
    try:
        return Tokenizer.from_dir(model_dir).decode(found)
    except ValueError:  # token ids alone
        return " ".join(map(str, found))
