"""Small models with four layers, and batches whose rows have different numbers of labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.pipeline import NxDPPModel
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


class Block(nn.Module):
    def __init__(self, size: int, rate: float):
        super().__init__()
        self.linear, self.dropout = nn.Linear(size, size), nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


class Residual(nn.Module):
    """Blocks, a dropout between them that no stage owns, and a root parameter that the last one uses."""

    def __init__(self, blocks: int = 4, size: int = 6, rate: float = 0.0):
        super().__init__()
        self.bias = nn.Parameter(torch.full((size,), 0.1))
        self.blocks = nn.ModuleList(Block(size, rate) for _ in range(blocks))
        self.between = nn.Dropout(rate)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor, y: Tensor, factor: float = 1.0) -> dict[str, Tensor]:
        for block in self.blocks:
            x = self.between(block(x))
        x = (x + self.bias) * self.scale * factor
        return {"other": x, "the_loss": F.mse_loss(x, y)}


class Backwards(Residual):
    """Its blocks are called in another order than they are defined, so weights are needed where they are not held."""

    def forward(self, x: Tensor, y: Tensor, factor: float = 1.0) -> dict[str, Tensor]:
        for block in reversed(self.blocks):
            x = block(x)
        return {"other": x, "the_loss": F.mse_loss(x, y)}


SPEC = {"other": False, "the_loss": True}


def data(rows: int = 8) -> dict[str, Tensor]:
    x, y = torch.randn(2, rows, 6, generator=torch.Generator().manual_seed(2), dtype=torch.get_default_dtype())
    return {"x": x, "y": y}


def residual(rate: float = 0.0, **options: Any) -> NxDPPModel:
    torch.manual_seed(5)
    given = {"auto_partition": True, "num_microbatches": 4, "output_loss_value_spec": SPEC, **options}
    return NxDPPModel(Residual(rate=rate), **given)


class Called(nn.Module):
    """Three layers of width 4, called as a test says."""

    def __init__(self, first: nn.Module, second: nn.Module, call: Callable[[Any, Tensor], Tensor]):
        super().__init__()
        self.first, self.second, self.last = first, second, nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.call(self, x).square().mean()


class Lazy(nn.Linear):
    """Makes a table at its first call, after something that the meta device cannot do."""

    def __init__(self, decides: bool = False):
        super().__init__(4, 4)
        self.decides = decides
        self.tables: dict[int, Tensor] = {}
        self.seen: list[Tensor] = []

    def forward(self, input: Tensor) -> Tensor:
        if 4 not in self.tables:
            self.tables[4] = torch.arange(4, dtype=input.dtype, device=input.device)
        self.seen.append(input)
        if self.decides and float(input.sum()) > 1e9:
            return input
        return super().forward(input) + self.tables[4]


class Masked(nn.Linear):
    """Takes a value from an attribute that the model sets."""

    mask: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.mask
