"""Build a model of transformers from its configuration, split over the ranks of the context."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nxd_infer.distributed.apply import apply_plan, split
from nxd_infer.distributed.plan_registry import plan_for
from nxd_infer.errors import ModelConfigError
from nxd_infer.parallel_layers.base import parameters_on_meta, real_cpu_tensors
from nxd_models.generic import attention
from nxd_models.generic.config import library, transformers_config


def parallel_model(
    kind: str, raw: Mapping[str, Any], dtype: torch.dtype, *, cached: bool = False, eager: bool = False, **own: Any
) -> Any:
    """Return transformers' ``kind`` (such as ``AutoModelForCausalLM``) for ``raw``: this rank's part of it.

    ``cached``: its attention is :mod:`nxd_models.generic.attention`; ``eager``: transformers' own of this name, which
    leaves nothing out; else transformers' choice. ``own``: arguments that its class may take. Built on the meta device
    it has no weights, but buffers, which no checkpoint has, have values.
    """
    config = transformers_config(raw)
    plan = plan_for(config)
    auto = getattr(library(), kind)
    known = inspect.signature(auto._model_mapping[type(config)]).parameters
    own = {name: value for name, value in own.items() if name in known}
    own |= {"attn_implementation": "eager"} if cached or eager else {}
    on_meta = torch.empty(0).is_meta
    with real_cpu_tensors(), parameters_on_meta() if on_meta else contextlib.nullcontext():
        model = auto.from_config(config, dtype=dtype, **own).eval()
    if cached:
        attention.register()
        model.config._attn_implementation = attention.NAME  # only now: some models look up their classes by it
    if any(weight.is_meta for weight in model.parameters()):
        split(model, plan)
        return model
    return apply_plan(model, plan)


def adopt(module: nn.Module, model: nn.Module) -> None:
    """Make the modules of ``model`` those of ``module`` too, so that weights have transformers' names."""
    own = [name for name, _ in (*model.named_parameters(recurse=False), *model.named_buffers(recurse=False))]
    if own:
        raise ModelConfigError(f"{type(model).__name__} has weights outside of its modules: {', '.join(own)}")
    for name, child in model.named_children():
        module.add_module(name, child)
    module.nxd_prefix = model.base_model_prefix  # which a checkpoint's names may have, or lack
