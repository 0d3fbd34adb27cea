"""Create the model and the optimizer that train over all ranks, from a configuration.

Source: NxD Core training API.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from nxd_infer.checkpoint.api import load_checkpoint
from nxd_infer.context import current_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.modules.lora import LoRAModel
from nxd_infer.modules.nxd_model import NxDModel
from nxd_infer.optimizer.parallel import NxDOptimizer, Parameters
from nxd_infer.optimizer.zero1 import NeuronZero1Optimizer
from nxd_infer.parallel_layers.pad import pad_model
from nxd_infer.pipeline.model import NxDPPModel
from nxd_infer.trainer.activation_checkpoint import apply_activation_checkpoint
from nxd_infer.trainer.build import build_model, same_random_numbers
from nxd_infer.trainer.config import TrainConfig, initialize, neuronx_distributed_config, require_degrees
from nxd_infer.trainer.one_model import require_one_model

__all__ = ["initialize_parallel_model", "initialize_parallel_optimizer", "neuronx_distributed_config"]


def initialize_parallel_model(
    nxd_config: Mapping[str, Any], model_fn: Callable[..., nn.Module], *model_args: Any, **model_kwargs: Any
) -> NxDModel:
    """Build ``model_fn(*model_args, **model_kwargs)`` on this rank with the options of ``nxd_config``, and wrap it.

    Every rank must call it. All ranks draw the same random numbers while they build, so they hold parts of one model.
    A boolean before ``model_args`` that ``model_fn`` does not take is the reference's ``include_buffers``: with False,
    ``meta_device_init`` leaves buffers their values. With ``pipeline_parallel_size`` above 1 this rank keeps its stages
    of it, in an NxDPPModel: train with its ``run_train``. With more ranks than ``sequential_move_factor``, ``model_fn``
    runs on that many at a time and must not communicate.

    Raises ParallelConfigError for a configuration that does not fit the model or the current degrees, and for a model
    that was built before, for other degrees or with other values on each data parallel rank.
    """
    config = TrainConfig.of(nxd_config)
    initialize(config)
    require_degrees(config)
    model_args, model_kwargs, include_buffers = _without_include_buffers(model_fn, model_args, model_kwargs)
    model, stage = build_model(config, model_fn, model_args, model_kwargs, include_buffers)
    if config.pad_model:
        degree, heads = current_context().tp.degree, _heads(model)
        pad_model(model, degree, heads)
        if stage is not None:
            stage.change_others(lambda module: pad_model(module, degree, heads))
    built_with = dict(config)
    if config.lora_config is not None and config.lora_config.enable_lora:
        with same_random_numbers(current_context()):
            layouts = None if stage is None else stage.layouts
            model = LoRAModel(model, config.lora_config, layouts=layouts, base_follows=True)
        built_with["lora_config"] = model.lora_config  # an adapter that it starts from has its own
    require_one_model(model)
    apply_activation_checkpoint(model, config.activation_checkpoint_config, config.pipeline_config)
    wrapped = NxDModel(model, built_with) if stage is None else NxDPPModel.of_stage(model, stage, built_with)
    stored = model.base_checkpoint if isinstance(model, LoRAModel) else None
    if stored is not None:
        load_checkpoint(stored.parent, stored.name, model=wrapped)
    return wrapped


def initialize_parallel_optimizer(
    nxd_config: Mapping[str, Any],
    optimizer_class: type[torch.optim.Optimizer],
    parameters: Parameters,
    **defaults: Any,
) -> NxDOptimizer:
    """Create ``optimizer_class(parameters, **defaults)`` with the options of ``nxd_config``, over all ranks.

    ``parameters`` are the wrapped model's, in any form that an optimizer takes. Returns a ``torch.optim.Optimizer``,
    with ``zero_one_enabled`` a NeuronZero1Optimizer. Every rank must call it.
    """
    config = TrainConfig.of(nxd_config)
    initialize(config)
    require_degrees(config)
    options, precision = config.optimizer_config, config.mixed_precision_config
    common = {
        "grad_clipping": options.grad_clipping,
        "on_nonfinite": options.on_nonfinite,
        "bucket_cap_mb": options.bucket_cap_mb,
    }
    if options.zero_one_enabled:
        return NeuronZero1Optimizer(
            parameters,
            optimizer_class,
            master_weights=precision.use_master_weights,
            max_norm=options.max_grad_norm,
            use_grad_acc_hook=precision.use_fp32_grad_acc,
            **common,
            **defaults,
        )
    return NxDOptimizer(
        parameters,
        optimizer_class,
        max_grad_norm=options.max_grad_norm,
        master_weights=precision.use_master_weights,
        fp32_grad_acc=precision.use_fp32_grad_acc,
        defaults=defaults,
        **common,
    )


def _without_include_buffers(fn: Callable[..., Any], args: tuple, kwargs: dict) -> tuple[tuple, dict, bool]:
    """Return the arguments of ``fn`` alone, and the flag, True without one."""
    others = {name: value for name, value in kwargs.items() if name != "include_buffers"}
    first, rest = (args[0], args[1:]) if args and isinstance(args[0], bool) else (True, args)
    named = bool(kwargs.get("include_buffers", True))
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return args, kwargs, True
    for choice in ((args, kwargs, True), (args, others, named), (rest, others, first and named)):
        with contextlib.suppress(TypeError):
            signature.bind(*choice[0], **choice[1])
            return choice
    return args, kwargs, True  # whose TypeError it is


def _heads(model: nn.Module) -> int:
    """Return the number of attention heads of the full model, from its configuration."""
    config = getattr(model, "config", None)
    for name in ("num_attention_heads", "num_heads", "n_head"):
        found = getattr(config, name, None)
        if isinstance(found, int):
            return found
    raise ParallelConfigError(
        "pad_model=True needs the number of heads, but the model has no config.num_attention_heads; add one, or call "
        "nxd_infer.parallel_layers.pad.pad_model() in your model function"
    )
