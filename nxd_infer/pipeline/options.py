"""``pipeline_config``: the arguments of NxDPPModel, checked.

Source: API guide, "Neuron Distributed Pipeline Model". Options beyond the documents are marked "ours".
"""

from __future__ import annotations

import os
import types
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from nxd_infer.errors import ParallelConfigError
from nxd_infer.pipeline.schedule import SCHEDULES
from nxd_infer.util.option_dict import Options, option
from nxd_infer.util.options import whole_number

TRACERS = ("hf", "torch")


_WHOLE = partial(whole_number, error=ParallelConfigError, minimum=1)


def _boolean(what: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ParallelConfigError(f"{what} must be True or False, got {value!r}")
    return value


def _names(what: str, value: Any) -> list[str] | None:
    if value is None:
        return None
    if isinstance(value, str) or not all(isinstance(name, str) for name in value):
        raise ParallelConfigError(f"{what} must be a list of names, got {value!r}")
    return list(value)


def _layer_class(what: str, value: Any) -> Any:
    if (
        value is not None
        and not isinstance(value, str)
        and not (isinstance(value, type) and issubclass(value, nn.Module))
    ):
        raise ParallelConfigError(f"{what} must be a class derived from torch.nn.Module or its name, got {value!r}")
    return value


def _classes(what: str, value: Any) -> list[Any] | None:
    return None if value is None else [_layer_class(what, one) for one in value]


def _loss_spec(what: str, value: Any) -> Any:
    if value is not None and not isinstance(value, tuple | list | Mapping | bool):
        raise ParallelConfigError(f"{what} must be a tuple or a dict with True in the place of the loss, got {value!r}")
    return value


def _function(what: str, value: Any) -> Any:
    if value is not None and not callable(value):
        raise ParallelConfigError(f"{what} must be a function, or None, got {value!r}")
    return value


def _tracer(what: str, value: Any) -> Any:
    if value is not None and value not in TRACERS and not isinstance(value, type):
        raise ParallelConfigError(f'{what} must be "hf", "torch", a class, or None, got {value!r}')
    return value


def _path(what: str, value: Any) -> Any:
    if value is not None and not isinstance(value, str | os.PathLike):
        raise ParallelConfigError(f"{what} must be the path of a file, or None, got {value!r}")
    return value


def _schedule(what: str, value: Any) -> str | None:
    if value is not None and value not in SCHEDULES:
        raise ParallelConfigError(f"{what} must be one of {', '.join(map(repr, SCHEDULES))} or None, got {value!r}")
    return value


def _several(what: str, value: Any) -> Any:
    if value is not None and not (isinstance(value, list | tuple) and all(map(_wraps, value))):
        raise ParallelConfigError(f"{what} must be a list or tuple of Python modules and functions, got {value!r}")
    return value


def _wraps(value: Any) -> bool:
    return isinstance(value, types.ModuleType) or callable(value)


def _methods(what: str, value: Any) -> Any:
    if value is not None and not (isinstance(value, Mapping) and all(_has(*pair) for pair in value.items())):
        raise ParallelConfigError(
            f"{what} must be a dict of objects with lists of the names of their methods, got {value!r}"
        )
    return value


def _has(target: Any, names: Any) -> bool:
    return isinstance(names, list | tuple) and all(
        isinstance(name, str) and callable(getattr(target, name, None)) for name in names
    )


_LIKE_FX = "with `tracer_cls`: as `torch.fx.Tracer` has it"


class PipelineOptions(Options):
    name = "pipeline_config"
    only_given = True

    transformer_layer_cls: Any = option(
        None,
        'class of the transformer layers, or its name: for `auto_partition` and `activation_checkpoint_config="full"`',
        _layer_class,
    )
    num_microbatches: int = option(1, "parts that a batch is split into, along the first dimension", _WHOLE)
    output_loss_value_spec: Any = option(None, "where in the model's output the loss is", _loss_spec)
    return_mb_loss: bool = option(False, "return the loss of each microbatch, in a list", _boolean)
    broadcast_and_average_loss: bool = option(False, "average the loss over the data-parallel ranks too", _boolean)
    pipeline_cuts: list[str] | None = option(None, "names of the last layer of every stage but the last one", _names)
    auto_partition: bool = option(False, "choose the cuts, so that stages cost the same", _boolean)
    input_names: list[str] | None = option(None, "the inputs of the model; None: the parameters of its forward", _names)
    leaf_module_cls: list[Any] | None = option(None, "classes, or names of some, that no cut lies inside of", _classes)
    autowrap_functions: Any = option(None, _LIKE_FX, _several)
    autowrap_modules: Any = option(None, _LIKE_FX, _several)
    autowrap_obj_methods: Any = option(
        None, "with `tracer_cls`: objects, with the names of methods that are not traced into", _methods
    )
    tracer_cls: Any = option(
        None, 'trace the code around the layers: `"torch"`, `"hf"` or a class derived from `torch.fx.Tracer`', _tracer
    )
    param_init_fn: Any = option(None, "what fills a module that was built on the meta device", _function)
    trace_file_path: Any = option(None, "write a timeline of the last step into this file (Chrome's format)", _path)
    use_zero1_optimizer: bool = option(False, "accepted: the optimizer averages gradients", _boolean)
    use_optimizer_wrapper: bool = option(False, "accepted: the optimizer averages gradients", _boolean)
    virtual_pipeline_size: int = option(1, "stages per rank: above 1 the schedule is interleaved", _WHOLE)
    fuse_microbatches: bool = option(False, "accepted: microbatches run one by one", _boolean)
    schedule: str | None = option(
        None,
        'ours: `"1f1b"`, `"gpipe"`, `"interleaved"` or `"zero-bubble"`; None: by `virtual_pipeline_size`',
        _schedule,
    )

    def agree(self, values: Mapping[str, Any]) -> None:
        if values.get("auto_partition") and values.get("pipeline_cuts"):
            raise ParallelConfigError(
                f"pipeline_config: auto_partition=True chooses the cuts, so pipeline_cuts={values['pipeline_cuts']} "
                "must be left out"
            )
        if values.get("return_mb_loss") and values.get("broadcast_and_average_loss"):
            raise ParallelConfigError(
                "pipeline_config: broadcast_and_average_loss=True gives one number, so return_mb_loss must be False"
            )

    @property
    def schedule_name(self) -> str:
        return self.schedule or ("interleaved" if self.virtual_pipeline_size > 1 else "1f1b")
