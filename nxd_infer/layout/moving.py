"""Move a model to a device without losing the attributes of its parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def move_model_to_device(model: nn.Module, device: torch.device | str) -> nn.Module:
    """Move ``model`` in place and return it, keeping the attributes that parallel layers set on their parameters.

    On some devices ``Module.to`` creates new parameters, untied and without the attributes (``tensor_model_parallel``,
    ``partition_dim``, ``nxd_layout``, ...); both are restored.
    """
    found: dict[int, tuple[nn.Parameter, dict[str, Any], list[tuple[nn.Module, str]]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                entry = found.setdefault(id(parameter), (parameter, dict(vars(parameter)), []))
                entry[2].append((module, name))
    model.to(device)
    for _, attributes, places in found.values():
        first, name = places[0]
        moved = first._parameters[name]
        for module, other in places[1:]:
            module._parameters[other] = moved
        for key, value in attributes.items():
            setattr(moved, key, value)
    return model
