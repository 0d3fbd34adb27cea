"""The training configuration: :class:`TrainConfig`, a dictionary of declared options.

Source: NxD Core training API, "Initialize NxD Core config". Options beyond the document are marked "ours".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nxd_infer.comm.launched import is_launched
from nxd_infer.context import current_context, default_context
from nxd_infer.errors import NotInitializedError, ParallelConfigError
from nxd_infer.modules.lora.config import LoraConfig
from nxd_infer.optimizer.groups import NORM, ON_NONFINITE
from nxd_infer.parallel_state import initialize_model_parallel, model_parallel_is_initialized
from nxd_infer.pipeline.options import PipelineOptions
from nxd_infer.util.also_called import also_called
from nxd_infer.util.devices import group_exists
from nxd_infer.util.options import Kind, OptionDict, option, table

__all__ = ["TrainConfig", "neuronx_distributed_config"]


def _recomputed(value: Any) -> bool:
    several = list(value) if isinstance(value, list | tuple | set | frozenset) else [value]
    return value == "full" or bool(several and all(isinstance(one, type) for one in several))


_FILL = Kind("a function of a module", callable)
_RECOMPUTED = Kind('"full", a class, several', _recomputed)


class OptimizerOptions(OptionDict):
    name = "optimizer_config"

    zero_one_enabled: bool = option(
        False, "ZeRO-1: each data-parallel rank steps and keeps the state of `1/dp` of the elements", bool
    )
    grad_clipping: bool = option(True, "scale gradients down to `max_grad_norm`", bool)
    max_grad_norm: float = option(1.0, "largest 2-norm of the whole model's gradients", NORM)
    on_nonfinite: str = option(
        "raise", 'ours: or `"skip"`: what a NaN or infinite gradient does to the step', str, choices=ON_NONFINITE
    )
    bucket_cap_mb: float = option(
        25.0, "ours: gradients are reduced in buckets of about this size while the backward runs", float, above=0
    )


class ModelInitOptions(OptionDict):
    name = "model_init_config"

    sequential_move_factor: int = option(
        11, "ranks that build their model at a time, 1 to 32", int, minimum=1, maximum=32
    )
    meta_device_init: bool = option(False, "build without memory, then fill what each module holds", bool)
    param_init_fn: Callable[..., object] | None = option(
        None, "what fills a module, `(module)` or `(module, device)`; None: its `reset_parameters`", _FILL
    )


class MixedPrecisionOptions(OptionDict):
    name = "mixed_precision_config"

    use_master_weights: bool = option(  # None until a TrainConfig knows what zero_one_enabled is
        None, "step float32 copies of bfloat16 weights; None: as `zero_one_enabled`", bool
    )
    use_fp32_grad_acc: bool = option(
        None, "sum bfloat16 gradients over backward passes in float32; None: as `zero_one_enabled`", bool
    )
    use_master_weights_in_ckpt: bool = option(
        False, "accepted: checkpoints always hold the masters, in the optimizer's state", bool
    )

    def agree(self, values: Mapping[str, Any]) -> None:
        if values.get("use_master_weights_in_ckpt") and values.get("use_master_weights") is False:
            raise ParallelConfigError(
                "mixed_precision_config: use_master_weights_in_ckpt=True needs use_master_weights=True, or there are "
                "none"
            )


class TrainConfig(OptionDict):
    """Every option of a training job, by key (``config["optimizer_config"]["max_grad_norm"]``) and by attribute.

    Raises ParallelConfigError for keys that there are not, naming the nearest, and for values out of range.
    """

    name = "nxd_config"
    inner = False

    tensor_parallel_size: int = option(
        1, "ranks that share each layer; data parallelism takes what is left of the world", int, minimum=1
    )
    pipeline_parallel_size: int = option(1, "ranks that share the layers in order", int, minimum=1)
    expert_parallel_size: int = option(
        1, "data-parallel ranks that share the experts of `nxd_infer.modules.moe`", int, minimum=1
    )
    context_parallel_size: int = option(1, "must be 1: no optimizer trains over it yet", int, minimum=1, maximum=1)
    lnc_size: int = option(1, "must be 1: cores are not combined", int, minimum=1, maximum=1)
    pipeline_config: PipelineOptions = option(
        None,
        "arguments of `NxDPPModel`; without a pipeline, `transformer_layer_cls` and `output_loss_value_spec` are used",
        PipelineOptions,
    )
    optimizer_config: OptimizerOptions = option(None, "how gradients are reduced and clipped", OptimizerOptions)
    activation_checkpoint_config: Any = option(
        None,
        'computed again in the backward pass: `"full"` (every transformer layer), a class of modules, or several',
        _RECOMPUTED,
        check=lambda _, classes: list(classes) if isinstance(classes, list | tuple | set | frozenset) else classes,
    )
    pad_model: bool = option(False, "pad attention heads that do not divide over the ranks", bool)
    sequence_parallel: bool = option(False, "split activations between the parallel blocks along the sequence", bool)
    model_init_config: ModelInitOptions = option(None, "how the model is built", ModelInitOptions)
    lora_config: LoraConfig | None = option(
        None,
        "a `nxd_infer.modules.lora.LoraConfig`, or a dict of its options: train adapters",
        check=lambda _, given: LoraConfig.of(given),
    )
    mixed_precision_config: MixedPrecisionOptions = option(None, "dtypes of weights and sums", MixedPrecisionOptions)

    sequential_move_factor: int | None = option(
        None, "that of `model_init_config`, if it has none", int, minimum=1, maximum=32
    )

    def __init__(self, given: Any = None):
        if isinstance(given, Mapping) and (factor := given.get("sequential_move_factor")) is not None:
            init = {"sequential_move_factor": factor, **(given.get("model_init_config") or {})}
            given = {**given, "model_init_config": init}
        super().__init__(given)
        precision = self.mixed_precision_config
        for key in ("use_master_weights", "use_fp32_grad_acc"):
            if precision[key] is None:
                precision[key] = self.optimizer_config.zero_one_enabled

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> TrainConfig:
        """``config`` itself, or what a dictionary of some of its options stands for."""
        if isinstance(config, TrainConfig):
            return config
        if not isinstance(config, Mapping):
            raise ParallelConfigError(
                f"nxd_config is what neuronx_distributed_config() returns, got {type(config).__name__}"
            )
        return cls(config)


@also_called(
    "tensor_parallel_size pipeline_parallel_size expert_parallel_size context_parallel_size pipeline_config "
    "optimizer_config activation_checkpoint_config pad_model sequence_parallel model_init_config lora_config "
    "mixed_precision_config sequential_move_factor lnc_size",
    when=lambda given: len(given) > 2 and isinstance(given[2], int),
)
def neuronx_distributed_config(
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    pipeline_config: Mapping[str, Any] | None = None,
    optimizer_config: Mapping[str, Any] | None = None,
    activation_checkpoint_config: str | type | Sequence[type] | None = None,
    pad_model: bool = False,
    sequence_parallel: bool = False,
    model_init_config: Mapping[str, Any] | None = None,
    lora_config: Any = None,
    *,
    mixed_precision_config: Mapping[str, Any] | None = None,
    expert_parallel_size: int = 1,
    context_parallel_size: int = 1,
    sequential_move_factor: int | None = None,
    lnc_size: int = 1,
) -> TrainConfig:
    """Check the options of a training job, fill in the defaults, and initialise model parallelism.

    {options}
    By place the arguments are also taken in the reference's order, two more degrees before ``pipeline_config``.
    Returns a dict of dicts with all of it, independent of what was passed; what is set in it later is checked then.
    Where this process is one of several, by its ``torch.distributed`` process group or by its launcher,
    ``initialize_model_parallel`` has been called (once; with other degrees it must be destroyed first). It starts the
    process group that a launched program has not started.

    Raises ParallelConfigError for unknown keys (naming the nearest known one), values out of range, and degrees that do
    not fit the world or what is initialised already.
    """
    config = TrainConfig(locals())
    initialize(config)
    return config


neuronx_distributed_config.__doc__ = inspect.cleandoc(neuronx_distributed_config.__doc__ or "").replace(
    "{options}", f"{table(TrainConfig, 'option')}\n"
)


def initialize(config: TrainConfig) -> None:
    """Initialise model parallelism where a launcher has started this process; what is there must be the same."""
    if model_parallel_is_initialized():
        require_degrees(config)
    elif group_exists() or is_launched():
        initialize_model_parallel(
            config.tensor_parallel_size,
            config.pipeline_parallel_size,
            expert_model_parallel_size=config.expert_parallel_size,
        )


def require_degrees(config: TrainConfig) -> None:
    """Raise unless the current context has the degrees of ``config``."""
    context = current_context()
    for axis, name in (
        ("tp", "tensor_parallel_size"),
        ("pp", "pipeline_parallel_size"),
        ("ep", "expert_parallel_size"),
    ):
        found = context.axis(axis).degree
        expected = config[name]
        if found == expected:
            continue
        if default_context() is None and context.world_size == 1:
            raise NotInitializedError(
                f"{name}={expected} needs {expected} processes: start them with torchrun, or call "
                "torch.distributed.init_process_group() before neuronx_distributed_config()"
            )
        raise ParallelConfigError(
            f"{name}={expected}, but model parallelism is initialised with {found}; call "
            "parallel_state.destroy_model_parallel() before changing it"
        )
