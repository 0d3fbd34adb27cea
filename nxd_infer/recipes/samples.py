"""A text that a model in training writes, to look at."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from nxd_server.text.tokenizer import Tokenizer

PROMPT = 16
"""Tokens of the validation data that a sample begins with."""


@torch.no_grad()
def sample(model: nn.Module, model_dir: Path, ids: Tensor, count: int, device: torch.device) -> str:
    """Return the start of ``ids`` and ``count`` further tokens, the likeliest each, as text. Every rank calls it."""
    training = model.training
    model.eval()
    known = ids[:PROMPT][None].to(device)
    try:
        for _ in range(count):
            best = model(known)[:, -1].argmax(-1, keepdim=True)
            known = torch.cat([known, best], 1)
    finally:
        model.train(training)
    try:
        return Tokenizer.from_dir(model_dir).decode(known[0].tolist())
    except ValueError:  # token ids alone
        return " ".join(map(str, known[0].tolist()))
