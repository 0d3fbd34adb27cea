"""From a batch of the loader to what the model takes: microbatches without needless padding and masks."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from nxd_infer import comm
from nxd_infer.context import ParallelContext
from nxd_infer.errors import RecipeError
from nxd_infer.parallel_layers.loss_functions import IGNORED
from nxd_infer.pipeline.microbatches import split_batch

PIECE = 8
"""Rows are cut to a multiple of this many columns per tensor-parallel rank."""


def sizes_of(batch: dict[str, Tensor]) -> Tensor:
    """Return the tokens of a batch that are not padding, and the sum of its documents' squared lengths: float64 [2]."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    if mask is None:  # a document per row, without padding
        lengths = torch.full((ids[..., 0].numel(),), ids.shape[-1], dtype=torch.float64, device=ids.device)
    else:
        owner = mask.reshape(-1, mask.shape[-1]).to(torch.int64)
        lengths = torch.zeros(len(owner), int(owner.max()) + 1, dtype=torch.float64, device=mask.device)
        lengths.scatter_add_(1, owner, torch.ones_like(owner, dtype=torch.float64))
        lengths = lengths[:, 1:]  # 0 is padding
    return torch.stack([lengths.sum(), lengths.square().sum()])


class Batches:
    """Prepares batches for a model's ``forward``.

    ``pairs``: rows are pairs of answers. ``parts``: microbatches of a batch, which the model splits itself if it is a
    pipeline (``whole``).
    """

    def __init__(self, forward: Any, context: ParallelContext, parts: int, *, pairs: bool, whole: bool):
        self.context, self.parts, self.pairs, self.whole = context, parts, pairs, whole
        self.takes = set(inspect.signature(forward).parameters)

    def prepared(
        self, batch: dict[str, Tensor], device: torch.device, parts: int | None = None
    ) -> list[dict[str, Any]]:
        """Return the calls of a step: keyword arguments of ``run_train``, whose losses add up to the step's loss.

        ``parts``: microbatches of this batch; None: as many as in training.
        """
        parts = parts or self.parts
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        shared: dict[str, Any] = {}
        if self.pairs:
            batch = {name: tensor.flatten(0, 1) for name, tensor in batch.items()}
            shared["share"] = 1.0 if self.whole else 1 / parts
        elif "num_items_in_batch" in self.takes:
            shared["num_items_in_batch"] = self.items(batch["labels"])
        elif (parts > 1 and not self.whole) or self.context.dp.degree > 1:
            raise RecipeError(
                "the model's forward takes no num_items_in_batch, so the losses of microbatches and data-parallel "
                "ranks cannot be added up: add it (see docs/recipes.md), or train with data.global_batch_size = "
                "micro_batch_size on one data-parallel rank"
            )
        if self.whole:
            return [{**self._known(batch), **shared}]
        return [{**self._known(self._trimmed(part)), **shared} for part in split_batch(batch, parts)]

    def items(self, labels: Tensor) -> Tensor:
        """Return the number by which each rank divides its sum of losses: gradients are averaged over ``dp`` ranks."""
        count = (labels[:, 1:] != IGNORED).sum().double()
        dp = self.context.dp.degree
        total = comm.all_reduce(count[None], self.context, "dp")[0] if dp > 1 else count
        return (total / dp).clamp(min=1e-9).to(torch.float32)

    def _trimmed(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Cut columns that are padding in every row; drop masks that a causal model does not need."""
        mask = batch.get("attention_mask")
        if mask is None:
            return batch
        piece = PIECE * self.context.tp.degree
        used = int((mask != 0).any(0).nonzero().max()) + 1 if bool((mask != 0).any()) else 1
        used = min(mask.shape[1], -(-used // piece) * piece)
        if used < mask.shape[1]:
            batch = {
                name: t[:, :used] if t.dim() > 1 and t.shape[1] == mask.shape[1] else t for name, t in batch.items()
            }
        if not self.pairs and int(mask.max()) <= 1:  # one document per row, padded at its end: no token sees padding
            batch = {name: t for name, t in batch.items() if name not in ("attention_mask", "position_ids")}
        return batch

    def _known(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        unknown = [name for name in batch if name not in self.takes]
        if unknown:
            raise RecipeError(
                f"the model's forward takes no {unknown[0]}, which the data has: documents that share a row need "
                "attention_mask and position_ids (see docs/recipes.md)"
            )
        return batch
