"""Moving a model to a device without losing what its parameters were marked with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def move_model_to_device(model: nn.Module, device: torch.device | str) -> nn.Module:
    """Move ``model`` in place and return it, keeping what parallel layers attached to their parameters.

    ``Module.to`` makes new parameters on some devices, without the attributes (``tensor_model_parallel``,
    ``partition_dim``, ``nxd_layout``, ...) and untied; both are restored.
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
