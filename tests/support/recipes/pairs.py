"""A batch of pairs, and its loss on a rank: without trl, which ranks would wait for."""

from __future__ import annotations

from pathlib import Path

import torch

from nxd_infer.parallel_layers.loss_functions import IGNORED
from nxd_infer.recipes.job import make_model
from nxd_infer.recipes.schema import Dpo
from tests.support.tiny_models import PAD, VOCAB_SIZE

PAIRS, LENGTH = 3, 24


def batch() -> dict[str, torch.Tensor]:
    """Pairs of answers of different lengths: rows [2 * pairs, S], a chosen one, then its rejected one."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, VOCAB_SIZE, (2 * PAIRS, LENGTH), generator=generator)
    mask, targets = torch.ones_like(ids), ids.clone()
    for row in range(2 * PAIRS):
        prompt, size = 4 + row // 2, 12 + 2 * row
        ids[row, :prompt] = ids[row // 2 * 2, :prompt]
        mask[row, size:] = 0
        ids[row, size:] = PAD
        targets[row, :prompt] = targets[row, size:] = IGNORED
    return {"input_ids": ids, "attention_mask": mask, "targets": torch.where(targets == IGNORED, targets, ids)}


def rank_loss(folder: str, reference: torch.Tensor) -> float:
    model = make_model(Path(folder), Path(folder), torch.float32, Dpo(kl_beta=0.3))
    return model(**batch(), reference=reference).item()
