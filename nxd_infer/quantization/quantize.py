"""Make quantized layers of the parallel linear layers of a model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from nxd_infer.modules.moe.moe_parallel_layers import ExpertFusedColumnParallelLinear, ExpertFusedRowParallelLinear
from nxd_infer.parallel_layers.linear import ColumnParallelLinear, RowParallelLinear
from nxd_infer.quantization import quantization_layers as layers

DEFAULT_MAPPING: dict[type[nn.Module], Any] = {
    ExpertFusedColumnParallelLinear: layers.QuantizedExpertFusedColumnParallel,
    ExpertFusedRowParallelLinear: layers.QuantizedExpertFusedRowParallel,
    ColumnParallelLinear: layers.QuantizedColumnParallel,
    RowParallelLinear: layers.QuantizedRowParallel,
}


def convert(
    module: nn.Module,
    q_config: Mapping[str, Any] | None = None,
    inplace: bool = False,
    mapping: Mapping[type[nn.Module], Any] | None = None,
    modules_to_not_convert: Sequence[str] | None = None,
) -> nn.Module:
    """Return ``module`` with its layers of ``mapping`` quantized; at degrees above 1 every rank calls it.

    Args:
        q_config: None is int8 with one scale for a weight.
        inplace: change ``module`` itself, else a copy of it.
        mapping: ``{class: quantized class}``, which is made by its ``from_float(layer, q_config)``. Layers of exactly
            these classes are taken; default: the column and row parallel linear layers, and those of experts.
        modules_to_not_convert: paths of modules that stay as they are, with all below them. A path matches at any
            depth: ``"lm_head"`` also ``model.lm_head``.
    """
    mapping = DEFAULT_MAPPING if mapping is None else mapping
    module = module if inplace else copy.deepcopy(module)
    if type(module) in mapping:
        return mapping[type(module)].from_float(module, q_config)
    made: dict[nn.Module, nn.Module] = {}  # a layer under two names stays one
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        if type(layer) in mapping and not named_in(path, modules_to_not_convert or ()):
            if layer not in made:
                made[layer] = mapping[type(layer)].from_float(layer, q_config)
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, made[layer])
    return module


def named_in(path: str, patterns: Sequence[str]) -> bool:
    """Return whether a dotted path contains one of ``patterns``, in whole words."""
    return any(f".{pattern}." in f".{path}." for pattern in patterns)
