"""Weights that contain an adapter: how a state dict says so, and the tied weights that merging separates."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch

from nxd_infer.context import current_context
from nxd_infer.errors import LoraTargetError, WeightMismatchError
from nxd_infer.layout import ParamLayout

logger = logging.getLogger(__name__)
MARK = "nxd_merged_lora"
"""In the ``_metadata`` of a state dict with merged weights, which ``torch.save`` keeps."""


def mark(state_dict: Any, prefix: str = "") -> None:
    """Note in a state dict of a module that its weights contain the adapter."""
    if hasattr(state_dict, "_metadata"):
        state_dict._metadata.setdefault(prefix[:-1], {})[MARK] = True


def contains_adapter(state_dict: Mapping[str, Any]) -> bool | None:
    """Return whether the weights of a state dict contain an adapter, None if it does not say."""
    stored, metadata = state_dict.get("lora_config"), getattr(state_dict, "_metadata", None)
    if isinstance(stored, Mapping):
        return bool(stored.get("merge_lora"))
    return None if metadata is None else MARK in metadata.get("", {})


def may_count_twice(merges: bool) -> None:
    """Raise WeightMismatchError if the model ``merges`` its adapter, so that such weights are likely; else warn."""
    if merges:
        raise WeightMismatchError(
            "these may be the merged weights that this model's state_dict() holds with merge_lora=True, and the "
            "adapter would count twice: first set lora_config.merge_lora = False for weights without an adapter, "
            "or call clear_adapter() for merged ones"
        )
    context = current_context()
    if context.tp.rank == context.dp.rank == 0:
        logger.warning(
            "the state dict does not say whether its weights contain an adapter (merge_lora=True), and the model's own "
            "is added to them: call clear_adapter() if they do"
        )


def require_mergeable(
    layouts: Mapping[str, ParamLayout], adapted: Collection[str], heads: Collection[str], merge_lora: bool
) -> None:
    """Raise LoraTargetError if a merged weight would change another layer, which the adapter does not.

    Args:
        layouts: of the whole model.
        adapted: the logical paths of all stages' adapted projections.
        heads: those of them that are embeddings whose weight the model's head reads.
        merge_lora: whether the configuration asks for it; else it is what its user does with the model.
    """
    fix = "pass merge_lora=False, or leave it out of target_modules" if merge_lora else "leave it out of target_modules"
    if heads:
        raise LoraTargetError(
            f"the model's head is the weight of {min(heads)!r}, so an adapter of the embedding alone cannot be merged "
            f"into it: {fix}"
        )
    if current_context().pp.degree == 1:
        return
    for name, layout in layouts.items():
        names = (*layout.logical_names, *layouts[layout.alias_of].logical_names) if layout.alias_of else ()
        changed = sorted({one.removesuffix(".weight") for one in names} & set(adapted))
        if changed:
            raise LoraTargetError(
                f"{name!r} and {layout.alias_of!r} are one weight, which pipeline stages share, so an adapter of "
                f"{changed[0]!r} cannot be merged into it: {fix}"
            )


def require_equal_ties(layouts: Mapping[str, ParamLayout], given: Mapping[str, Any]) -> None:
    """Raise WeightMismatchError if one weight of the model is two different ones in ``given``, by base names."""
    for name, layout in layouts.items():
        first = given.get(layout.alias_of or "")
        if first is not None and name in given and not torch.equal(given[name], first):
            raise WeightMismatchError(
                f"{name!r} and {layout.alias_of!r} are one weight in this model, and two different ones in the state "
                "dict: build the model without tying them"
            )
