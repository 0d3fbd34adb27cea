"""Build a model of transformers from its configuration, split over the ranks of the context."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from nxd_infer.context import current_context
from nxd_infer.distributed.apply import apply_plan, split
from nxd_infer.distributed.plans import plan_for
from nxd_infer.errors import ModelConfigError
from nxd_infer.parallel_layers.base import real_cpu_tensors
from nxd_models.generic import attention
from nxd_models.generic.config import library, transformers_config


def parallel_model(kind: str, raw: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Return transformers' ``kind`` (such as ``AutoModelForCausalLM``) for ``raw``, this rank's part of it.

    Its attention is ours (:mod:`nxd_models.generic.attention`). Buffers, which no checkpoint has, keep their values
    also on the meta device.
    """
    attention.register()
    config = transformers_config(raw)
    plan = plan_for(config)
    on_meta = torch.empty(0).is_meta
    with real_cpu_tensors(), _parameters_on_meta() if on_meta else contextlib.nullcontext():
        model = getattr(library(), kind).from_config(config, dtype=dtype, attn_implementation="eager").eval()
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


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put parameters of modules that this thread makes on the meta device; buffers keep their values."""
    thread = threading.get_ident()

    def to_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or param.is_meta or threading.get_ident() != thread:
            return None
        return nn.Parameter(param.to("meta"), param.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        handle.remove()
