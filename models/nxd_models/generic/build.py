"""Build a model of transformers from its configuration, split over the ranks of the context."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nxd_infer.context import current_context
from nxd_infer.distributed import plan_registry
from nxd_infer.distributed.apply import apply_plan, split
from nxd_infer.errors import CheckpointError, ModelConfigError
from nxd_infer.hugging_face.quantized.formats import format_in
from nxd_infer.layout.sources import DictSource
from nxd_infer.parallel_layers.base import parameters_on_meta, real_cpu_tensors
from nxd_models.generic import attention
from nxd_models.generic.config import library, transformers_config


def parallel_model(kind: str, raw: Mapping[str, Any], dtype: torch.dtype, *, cached: bool = False, **own: Any) -> Any:
    """Return transformers' ``kind`` (such as ``AutoModelForCausalLM``) for ``raw``: this rank's part of it.

    ``cached``: its attention is :mod:`nxd_models.generic.attention`; else transformers' choice, as what it calls eager
    can differ (Falcon's adds ALiBi twice). ``own``: arguments that its class may take. Built on the meta device it has
    no weights, but buffers, which no checkpoint has, have values.

    Raises ModelConfigError for several ranks if the model type has no tensor-parallel plan.
    """
    config, context = transformers_config(raw), current_context()
    planned = config.model_type in plan_registry.supported_types()
    if not planned and context.tp.degree * context.pp.degree > 1:
        raise ModelConfigError(f"{plan_registry.unknown_type(config.model_type)}; without one, trace it for one rank")
    on_meta = torch.empty(0).is_meta
    with real_cpu_tensors(), parameters_on_meta() if on_meta else contextlib.nullcontext():
        model = instance(kind, config, dtype, cached=cached, **own)
    if not planned:
        return model
    plan = plan_registry.plan_for(config)
    if any(weight.is_meta for weight in model.parameters()):
        split(model, plan)
        return model
    return apply_plan(model, plan)


def instance(kind: str, config: Any, dtype: torch.dtype, *, cached: bool = False, **own: Any) -> Any:
    """Return transformers' whole model, newly initialized; see :func:`parallel_model`.

    Experts are computed in the one way of transformers whose shapes do not depend on which of them are chosen.
    """
    auto = getattr(library(), kind)
    known = inspect.signature(auto._model_mapping[type(config)]).parameters
    own = {name: value for name, value in own.items() if name in known}
    own |= {"attn_implementation": "eager"} if cached else {}
    model = auto.from_config(config, dtype=dtype, **own).eval()
    if getattr(model, "_can_set_experts_implementation", bool)():
        model.set_experts_implementation("batched_mm")
    if cached:
        attention.register()
        for module in model.modules():  # only now: some models look up their classes by it
            found: Any = getattr(module, "config", None)
            if isinstance(found, library().PretrainedConfig):
                found._attn_implementation = attention.NAME
    return model


def adopt(module: nn.Module, model: nn.Module) -> None:
    """Make the modules of ``model`` those of ``module`` too, so that weights have transformers' names."""
    own = [name for name, _ in (*model.named_parameters(recurse=False), *model.named_buffers(recurse=False))]
    if own:
        raise ModelConfigError(f"{type(model).__name__} has weights outside of its modules: {', '.join(own)}")
    for name, child in model.named_children():
        module.add_module(name, child)
    module.nxd_prefix = model.base_model_prefix  # which a checkpoint's names may have, or lack


def weights(kind: str, model_dir: str | os.PathLike[str]) -> DictSource:
    """Read the weights of a directory as transformers does, under the names of its ``kind``.

    Releases differ in names and in how experts lie in files; transformers knows. What it would make up, because the
    files lack it, is left out. Raises CheckpointError for quantised weights, which it would not dequantise.
    """
    if (form := format_in(Path(model_dir))) is not None:
        problem = f"weights stored as {form} are not read for a model type without a tensor-parallel plan"
        raise CheckpointError(f"{model_dir}: {problem}: have transformers load the model, dequantize() and save it")
    try:
        model, info = getattr(library(), kind).from_pretrained(
            model_dir, dtype="auto", output_loading_info=True, local_files_only=True, use_safetensors=True
        )
    except Exception as error:
        raise CheckpointError(f"transformers cannot read the weights of {model_dir}: {error}") from error
    missing = info["missing_keys"]
    return DictSource({name: tensor for name, tensor in model.state_dict().items() if name not in missing})
