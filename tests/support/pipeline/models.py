"""Small models with four layers, and batches whose rows have different numbers of labels."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_models.bert.config import BertConfig
from nxd_models.bert.model import Encoder
from nxd_models.llama.model import CausalLM
from tests.support.trainer.models import CONFIG, FAMILIES

LAYERS = 4


def decoder(family: str = "llama", dtype: torch.dtype = torch.float32, layers: int = LAYERS) -> CausalLM:
    return CausalLM(replace(CONFIG, **{**FAMILIES[family], "num_layers": layers}), dtype)


def tokens(rows: int = 8, length: int = 6, uneven: bool = True, seed: int = 7) -> dict[str, Tensor]:
    """Ids and labels. ``uneven``: row ``i`` has no label at its first ``i`` positions, modulo their number."""
    ids = torch.randint(0, CONFIG.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    if uneven:
        for row in range(rows):
            labels[row, : row % (length - 1)] = -100
    return {"input_ids": ids, "labels": labels}


class Classifier(nn.Module):
    """Our BERT with a loss: the class of every token, labels beside the ids."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        config = BertConfig(
            model_type="bert",
            vocab_size=61,
            hidden_size=16,
            intermediate_size=24,
            num_layers=LAYERS,
            num_heads=2,
            max_position=32,
        )
        self.bert = Encoder(config, dtype)
        self.head = nn.Linear(16, 5, dtype=dtype)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.bert(input_ids, attention_mask))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), logits


def encoder(dtype: torch.dtype = torch.float32) -> Classifier:
    return Classifier(dtype)


def sentences(rows: int = 8, length: int = 6) -> dict[str, Tensor]:
    batch = tokens(rows, length, uneven=False)
    mask = torch.ones_like(batch["input_ids"])
    mask[1::2, -2:] = 0
    labels = (batch["labels"] % 5).masked_fill(mask == 0, -100)
    return {"input_ids": batch["input_ids"], "attention_mask": mask, "labels": labels}
