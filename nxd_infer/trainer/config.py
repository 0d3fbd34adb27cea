"""The training configuration: a plain dict with every option in it, checked once.

Source: NxD Core training API, "Initialize NxD Core config". Options beyond the document are marked so.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from nxd_infer.comm.launched import launched_world
from nxd_infer.context import current_context, default_context
from nxd_infer.errors import NotInitializedError, ParallelConfigError
from nxd_infer.modules.lora.config import LoraConfig
from nxd_infer.parallel_state import initialize_model_parallel, model_parallel_is_initialized
from nxd_infer.util.suggest import did_you_mean

__all__ = ["neuronx_distributed_config"]

OPTIMIZER = {
    "zero_one_enabled": False,
    "grad_clipping": True,
    "max_grad_norm": 1.0,
    "on_nonfinite": "raise",  # ours: or "skip"
    "bucket_cap_mb": 25.0,  # ours
}
MODEL_INIT = {"sequential_move_factor": 11, "meta_device_init": False, "param_init_fn": None}
MIXED_PRECISION = {
    "use_master_weights": None,  # as zero_one_enabled
    "use_fp32_grad_acc": None,  # as zero_one_enabled
    "use_master_weights_in_ckpt": False,
}
PIPELINE = (
    "transformer_layer_cls",
    "num_microbatches",
    "output_loss_value_spec",
    "return_mb_loss",
    "broadcast_and_average_loss",
    "pipeline_cuts",
    "input_names",
    "leaf_module_cls",
    "autowrap_functions",
    "autowrap_modules",
    "tracer_cls",
    "param_init_fn",
    "trace_file_path",
    "use_zero1_optimizer",
    "use_optimizer_wrapper",
    "auto_partition",
    "virtual_pipeline_size",
    "fuse_microbatches",
)
MOVE_FACTORS = range(1, 33)


def neuronx_distributed_config(
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    pipeline_config: Mapping[str, Any] | None = None,
    optimizer_config: Mapping[str, Any] | None = None,
    activation_checkpoint_config: str | type[nn.Module] | Sequence[type[nn.Module]] | None = None,
    pad_model: bool = False,
    sequence_parallel: bool = False,
    model_init_config: Mapping[str, Any] | None = None,
    lora_config: Any = None,
    *,
    mixed_precision_config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Check the options of a training job, fill in the defaults, and initialise model parallelism.

    Args:
        tensor_parallel_size: ranks that share each layer; data parallelism takes what is left of the world.
        pipeline_parallel_size: must be 1 for now.
        pipeline_config: options of the pipeline; kept for it. ``transformer_layer_cls`` and ``output_loss_value_spec``
            are used without one too.
        optimizer_config: ``zero_one_enabled`` (False), ``grad_clipping`` (True), ``max_grad_norm`` (1.0); ours:
            ``on_nonfinite`` ("raise" or "skip"), ``bucket_cap_mb`` (25.0).
        activation_checkpoint_config: "full" (every transformer layer is computed again in the backward pass), a module
            class or several, or None.
        pad_model: pad attention heads that do not divide over the ranks.
        sequence_parallel: split activations outside the parallel layers along the sequence. The model is built for it;
            see ``nxd_infer.parallel_layers.sequence_parallel``.
        model_init_config: ``sequential_move_factor`` (11; ranks that build their model at a time, 1 to 32),
            ``meta_device_init`` (False), ``param_init_fn`` (None: each module's ``reset_parameters``).
        lora_config: a ``nxd_infer.modules.lora.LoraConfig`` or a dict of its options: train adapters. None: train all.
        mixed_precision_config: ``use_master_weights`` and ``use_fp32_grad_acc`` (by default what ``zero_one_enabled``
            is), ``use_master_weights_in_ckpt`` (False).

    Returns a dict of dicts with all of it, independent of what was passed. Where this process is one of several, by its
    ``torch.distributed`` process group or by its launcher, ``initialize_model_parallel`` has been called (once; with
    other degrees it must be destroyed first). It starts the process group that a launched program has not started.

    Raises ParallelConfigError for unknown keys (naming the nearest known one), values out of range, and degrees that do
    not fit the world or what is initialised already.
    """
    config = checked(
        {
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": pipeline_parallel_size,
            "pipeline_config": pipeline_config,
            "optimizer_config": optimizer_config,
            "activation_checkpoint_config": activation_checkpoint_config,
            "pad_model": pad_model,
            "sequence_parallel": sequence_parallel,
            "model_init_config": model_init_config,
            "lora_config": lora_config,
            "mixed_precision_config": mixed_precision_config,
        }
    )
    initialize(config)
    return config


def checked(config: Mapping[str, Any]) -> dict[str, Any]:
    """A complete configuration of its own, from a complete or partial one. Starts nothing; checking twice is once."""
    if not isinstance(config, Mapping):
        raise ParallelConfigError(
            f"nxd_config is what neuronx_distributed_config() returns, got {type(config).__name__}"
        )
    defaults = {name: p.default for name, p in inspect.signature(neuronx_distributed_config).parameters.items()}
    full = _filled("nxd_config", config, defaults)
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        _check(name, full[name], _whole(full[name]) and full[name] >= 1, "a whole number of at least 1")
    if full["pipeline_parallel_size"] > 1:
        raise ParallelConfigError(
            f"pipeline_parallel_size={full['pipeline_parallel_size']}: pipelines are not supported yet; use 1 and "
            "raise tensor_parallel_size instead"
        )
    for name in ("pad_model", "sequence_parallel"):
        _check(name, full[name], isinstance(full[name], bool), "True or False")
    if full["lora_config"] is not None:
        full["lora_config"] = LoraConfig.of(full["lora_config"])
    full["pipeline_config"] = _filled("pipeline_config", full["pipeline_config"], dict.fromkeys(PIPELINE), sparse=True)
    full["optimizer_config"] = _optimizer(full["optimizer_config"])
    full["activation_checkpoint_config"] = _activation_checkpoint(full["activation_checkpoint_config"])
    full["model_init_config"] = _model_init(full["model_init_config"])
    full["mixed_precision_config"] = _mixed_precision(full["mixed_precision_config"], full["optimizer_config"])
    return full


def _optimizer(given: Any) -> dict[str, Any]:
    full = _filled("optimizer_config", given, OPTIMIZER)
    for name in ("zero_one_enabled", "grad_clipping"):
        _check(f"optimizer_config[{name!r}]", full[name], isinstance(full[name], bool), "True or False")
    for name in ("max_grad_norm", "bucket_cap_mb"):
        _check(f"optimizer_config[{name!r}]", full[name], _number(full[name]) and full[name] > 0, "a number above 0")
    how = full["on_nonfinite"]
    _check("optimizer_config['on_nonfinite']", how, how in ("raise", "skip"), '"raise" or "skip"')
    return full


def _activation_checkpoint(given: Any) -> Any:
    classes = list(given) if isinstance(given, list | tuple | set | frozenset) else given
    several = classes if isinstance(classes, list) else [classes]
    fits = classes is None or classes == "full" or (several and all(_module_class(one) for one in several))
    _check(
        "activation_checkpoint_config", given, fits, '"full", a class derived from torch.nn.Module, several, or None'
    )
    return classes


def _module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _model_init(given: Any) -> dict[str, Any]:
    full = _filled("model_init_config", given, MODEL_INIT)
    factor, meta, fill = full["sequential_move_factor"], full["meta_device_init"], full["param_init_fn"]
    where = "model_init_config"
    _check(f"{where}['sequential_move_factor']", factor, _whole(factor) and factor in MOVE_FACTORS, "1 to 32")
    _check(f"{where}['meta_device_init']", meta, isinstance(meta, bool), "True or False")
    _check(f"{where}['param_init_fn']", fill, fill is None or callable(fill), "a function of a module, or None")
    return full


def _mixed_precision(given: Any, optimizer: dict[str, Any]) -> dict[str, Any]:
    full = _filled("mixed_precision_config", given, MIXED_PRECISION)
    for name in ("use_master_weights", "use_fp32_grad_acc"):
        if full[name] is None:
            full[name] = optimizer["zero_one_enabled"]
    for name, value in full.items():
        _check(f"mixed_precision_config[{name!r}]", value, isinstance(value, bool), "True or False")
    if full["use_master_weights_in_ckpt"] and not full["use_master_weights"]:
        raise ParallelConfigError(
            "mixed_precision_config: use_master_weights_in_ckpt=True needs use_master_weights=True, or there are none"
        )
    return full


def _filled(what: str, given: Any, defaults: Mapping[str, Any], sparse: bool = False) -> dict[str, Any]:
    """A new dict: the defaults with ``given`` over them (``sparse``: only what is given). Unknown keys are refused."""
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise ParallelConfigError(f"{what} must be a dict or None, got {type(given).__name__}")
    for key in given:
        if key not in defaults:
            hint = did_you_mean(str(key), defaults) or f"; known are {', '.join(defaults)}"
            raise ParallelConfigError(f"{what} has no key {key!r}{hint}")
    return dict(given) if sparse else {**defaults, **given}


def _check(what: str, value: Any, fits: Any, wanted: str) -> None:
    if not fits:
        raise ParallelConfigError(f"{what} must be {wanted}, got {value!r}")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def initialize(config: Mapping[str, Any]) -> None:
    """Initialise model parallelism where this process is one of several; what is there already must be the same."""
    if model_parallel_is_initialized():
        require_degrees(config)
    elif (dist.is_available() and dist.is_initialized()) or launched_world() > 1:
        initialize_model_parallel(config["tensor_parallel_size"], config["pipeline_parallel_size"])


def require_degrees(config: Mapping[str, Any]) -> None:
    """Raise unless the current context has the degrees of ``config``."""
    context = current_context()
    for name, found in (("tensor_parallel_size", context.tp.degree), ("pipeline_parallel_size", context.pp.degree)):
        wanted = config[name]
        if found == wanted:
            continue
        if default_context() is None and context.world_size == 1:
            raise NotInitializedError(
                f"{name}={wanted} needs {wanted} processes: start them with torchrun, or call "
                "torch.distributed.init_process_group() before neuronx_distributed_config()"
            )
        raise ParallelConfigError(
            f"{name}={wanted}, but model parallelism is initialised with {found}; call "
            "parallel_state.destroy_model_parallel() before changing it"
        )
