"""Weights that a model's files lack, such as a new classifier: drawn as transformers does, equal on all ranks."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from nxd_infer import comm
from nxd_infer.context import ParallelContext
from nxd_infer.util.devices import HOST

logger = logging.getLogger(__name__)


def initialise(model: Any, names: Iterable[str], context: ParallelContext) -> None:
    """Give the parameters called ``names``, which are on the meta device, their initial values in ``model``.

    They are those of the first rank everywhere. A collective.
    """
    owners: dict[str, list[str]] = {}
    for name in names:
        path, _, own = name.rpartition(".")
        owners.setdefault(path, []).append(own)
    for path, lacking in owners.items():
        owner = model.get_submodule(path)
        drawn = _initialised(model, path, owner)
        for own in lacking:
            value = getattr(drawn, own).detach()
            for axis in ("tp", "dp", "cp", "pp"):
                value = comm.broadcast(value, context, axis)
            _replace(model, getattr(owner, own), value)
        logger.warning("%s has no stored weights for %s: they are initialised", path or "the model", lacking)


def _initialised(model: Any, path: str, owner: nn.Module) -> nn.Module:
    made = copy.deepcopy(owner).to_empty(device=HOST, recurse=False)
    for marked in (made, *made.parameters(recurse=False)):
        if hasattr(marked, "_is_hf_initialized"):  # or transformers would skip it
            del marked._is_hf_initialized
    with torch.no_grad():
        model._init_weights(made)
    return made


def _replace(model: nn.Module, old: nn.Parameter, value: torch.Tensor) -> None:
    """Put ``value`` in all places of ``old``."""
    new = nn.Parameter(value, old.requires_grad)
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is old:
                module.register_parameter(name, new)
