"""``pipeline_config``: the arguments of NxDPPModel, checked.

Source: API guide, "Neuron Distributed Pipeline Model". Options beyond the documents are marked "ours".
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import fx, nn

from nxd_infer.errors import ParallelConfigError
from nxd_infer.pipeline.schedule import SCHEDULES
from nxd_infer.util.options import Kind, OptionDict, option

_LAYER = Kind(
    "a class derived from torch.nn.Module or its name",
    lambda value: isinstance(value, str) or (isinstance(value, type) and issubclass(value, nn.Module)),
)
_LAYERS = Kind(
    "a list of classes derived from torch.nn.Module or their names",
    lambda value: isinstance(value, list | tuple) and all(map(_LAYER.fits, value)),
)
_LOSS = Kind(
    "a tuple or a dict with True in the place of the loss",
    lambda value: isinstance(value, tuple | list | Mapping | bool),
)
_TRACER = Kind(
    '"hf", "torch", a class derived from torch.fx.Tracer',
    lambda value: value in ("hf", "torch") or (isinstance(value, type) and issubclass(value, fx.Tracer)),
)
_FUNCTION = Kind("a function", callable)
_WRAPPED = Kind(
    "a list or tuple of Python modules and functions",
    lambda value: (
        isinstance(value, list | tuple) and all(isinstance(one, types.ModuleType) or callable(one) for one in value)
    ),
)
_METHODS = Kind(
    "a dict of objects with lists of the names of their methods",
    lambda value: isinstance(value, Mapping) and all(_has(*pair) for pair in value.items()),
)


def _has(target: Any, names: Any) -> bool:
    return isinstance(names, list | tuple) and all(
        isinstance(name, str) and callable(getattr(target, name, None)) for name in names
    )


def _listed(_: str, values: Any) -> list[Any]:
    return list(values)


class _ByName:
    """A Python module in a copy or a pickle, which becomes itself again: modules cannot be copied."""

    def __init__(self, module: types.ModuleType):
        self.name = module.__name__

    def __reduce__(self) -> Any:
        return importlib.import_module, (self.name,)


def _by_name(value: Any) -> Any:
    if isinstance(value, types.ModuleType):
        return _ByName(value)
    if type(value) in (list, tuple):
        return type(value)(map(_by_name, value))
    return {_by_name(key): inner for key, inner in value.items()} if type(value) is dict else value


_LIKE_FX = "with `tracer_cls`: as `torch.fx.Tracer` has it"


class PipelineOptions(OptionDict):
    name = "pipeline_config"
    only_given = True

    transformer_layer_cls: Any = option(
        None,
        'class of the transformer layers, or its name: for `auto_partition` and `activation_checkpoint_config="full"`',
        _LAYER,
    )
    num_microbatches: int = option(1, "parts that a batch is split into, along the first dimension", int, minimum=1)
    output_loss_value_spec: Any = option(None, "where in the model's output the loss is", _LOSS)
    return_mb_loss: bool = option(False, "return the loss of each microbatch, in a list", bool)
    broadcast_and_average_loss: bool = option(False, "average the loss over the data-parallel ranks too", bool)
    pipeline_cuts: list[str] | None = option(
        None, "names of the last layer of every stage but the last one", list[str], check=_listed
    )
    auto_partition: bool = option(False, "choose the cuts, so that stages cost the same", bool)
    input_names: list[str] | None = option(
        None, "the inputs of the model; None: the parameters of its forward", list[str], check=_listed
    )
    leaf_module_cls: list[Any] | None = option(
        None, "classes, or names of some, that no cut lies inside of", _LAYERS, check=_listed
    )
    autowrap_functions: Any = option(None, _LIKE_FX, _WRAPPED)
    autowrap_modules: Any = option(None, _LIKE_FX, _WRAPPED)
    autowrap_obj_methods: Any = option(
        None, "with `tracer_cls`: objects, with the names of methods that are not traced into", _METHODS
    )
    tracer_cls: Any = option(
        None, 'trace the code around the layers: `"torch"`, `"hf"` or a class derived from `torch.fx.Tracer`', _TRACER
    )
    param_init_fn: Any = option(None, "what fills a module that was built on the meta device", _FUNCTION)
    trace_file_path: Any = option(None, "write a timeline of the last step into this file (Chrome's format)", Path)
    use_zero1_optimizer: bool = option(False, "accepted: the optimizer averages gradients", bool)
    use_optimizer_wrapper: bool = option(False, "accepted: the optimizer averages gradients", bool)
    virtual_pipeline_size: int = option(1, "stages per rank: above 1 the schedule is interleaved", int, minimum=1)
    deallocate_pipeline_outputs: bool = option(False, "accepted: outputs are freed once they are sent", bool)
    fuse_microbatches: bool = option(False, "accepted: microbatches run one by one", bool)
    schedule: str | None = option(
        None,
        'ours: `"1f1b"`, `"gpipe"`, `"interleaved"` or `"zero-bubble"`; None: by `virtual_pipeline_size`',
        str,
        choices=SCHEDULES,
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

    def __reduce__(self) -> Any:
        return type(self), ({key: _by_name(value) for key, value in self.items()},)

    @property
    def schedule_name(self) -> str:
        return self.schedule or ("interleaved" if self.virtual_pipeline_size > 1 else "1f1b")
