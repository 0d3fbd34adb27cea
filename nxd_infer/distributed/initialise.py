"""Weights that a model's files lack, such as a new classifier: drawn as transformers does, equal on all ranks."""

from __future__ import annotations

import copy
import logging
import math
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from nxd_infer import comm
from nxd_infer.context import ParallelContext
from nxd_infer.errors import AdapterError
from nxd_infer.util.devices import HOST

logger = logging.getLogger(__name__)
_FACTOR = re.compile(r"\.lora_(?P<which>[AB])\.(?P<adapter>[^.]+)$")


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
    drawn_here = sorted(path for path in owners if not _FACTOR.search(path))
    if drawn_here:
        logger.warning("the files have no weights for %s: they are initialised", ", ".join(drawn_here))


def _initialised(model: Any, path: str, owner: nn.Module) -> nn.Module:
    made = copy.deepcopy(owner).to_empty(device=HOST, recurse=False)
    for marked in (made, *made.parameters(recurse=False)):
        if hasattr(marked, "_is_hf_initialized"):  # or transformers would skip it
            delattr(marked, "_is_hf_initialized")
    with torch.no_grad():
        if (factor := _FACTOR.search(path)) is None:
            model._init_weights(made)
        else:
            _initialise_factor(made, factor, model.peft_config[factor["adapter"]].init_lora_weights)
    return made


def _initialise_factor(made: Any, factor: re.Match[str], how: Any) -> None:
    """Draw a factor of LoRA as PEFT does."""
    if how not in (True, "gaussian"):
        raise AdapterError(
            f"init_lora_weights={how!r} needs the weights of the model; load it without lazy_load_for_parallelism()"
        )
    if factor["which"] == "B":
        nn.init.zeros_(made.weight)
    elif how == "gaussian":
        nn.init.normal_(made.weight, std=1 / made.out_features)
    else:
        nn.init.kaiming_uniform_(made.weight, a=math.sqrt(5))
    if made.bias is not None:
        nn.init.zeros_(made.bias)


def _replace(model: nn.Module, old: nn.Parameter, value: torch.Tensor) -> None:
    """Put ``value`` in all places of ``old``."""
    new = nn.Parameter(value, old.requires_grad)
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is old:
                module.register_parameter(name, new)
