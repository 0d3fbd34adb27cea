"""Check a ModelSpec against the modules that it creates. For the tests of packages that add a family.

from nxd_models.check_family import check_family

check_family("tiny_model_dir", degree=2)
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from nxd_infer.context import make_context, use_context
from nxd_infer.errors import ModelConfigError
from nxd_infer.hugging_face.stored import matched
from nxd_infer.hugging_face.weights import named_weights
from nxd_infer.layout import ParamLayout, weight_layout
from nxd_models import registry
from nxd_models.spec import Cut, ModelDirectory

STEP_OPTIONS: dict[str, dict[str, Any]] = {"generate": {"slots": 1, "max_len": 1}}


def check_family(model_dir: str | os.PathLike[str], degree: int = 2) -> None:
    """Check the family of a model directory, for every task it supports, as rank 0 of ``degree``.

    The serving step must have the module's weights; the directory must hold them all; they must be sharded according to
    the tensor-parallel plan; the blocks where a pipeline may be cut must exist. Raises ModelConfigError or
    WeightMismatchError that names the difference. Computes nothing and reads no weight.
    """
    directory = registry.load_config(model_dir)
    for task in directory.tasks:
        with use_context(make_context(degree, tp=degree)), torch.device("meta"):
            module = directory.make(task, torch.float32)
            step = directory.make(task, torch.float32, step=True, **STEP_OPTIONS.get(task, {}))
        theirs, ours = set(step.state_dict()), set(module.state_dict())
        if theirs != ours:
            raise _wrong(directory, task, f"the step and the module differ in the weights {sorted(theirs ^ ours)}")
        named_weights(module, registry.weights(directory.path))
        _check_blocks(directory, task, module)
        if directory.spec.tensor_parallel_plan is not None:
            cuts = dict(directory.spec.tensor_parallel_plan(directory.config, degree))
            _check_cuts(directory, task, cuts, weight_layout(module))


def _check_blocks(directory: ModelDirectory, task: str, module: nn.Module) -> None:
    name, count = directory.spec.tasks[task].blocks, directory.config.num_layers
    found = dict(module.named_modules()).get(name)
    if not isinstance(found, nn.ModuleList) or len(found) != count:
        raise _wrong(directory, task, f"blocks = {name!r} is not a module list of num_layers = {count} blocks")


def _check_cuts(directory: ModelDirectory, task: str, cuts: dict[str, Cut], layouts: dict[str, ParamLayout]) -> None:
    unused = set(cuts)
    for name, layout in layouts.items():
        layer = name.removesuffix(".weight")
        pattern = next((key for key in cuts if matched(key, layer, any_prefix=True) is not None), None)
        if layout.alias_of is not None or (pattern is None and layer == name):
            continue
        unused.discard(pattern or "")
        found = {dimension: axis for dimension, axis in enumerate(layout.axes) if axis.sharded}
        planned = {} if pattern is None else {cuts[pattern].dimension: cuts[pattern].axis}
        if found != planned:
            raise _wrong(directory, task, f"{layer} is cut as {found}, and its tensor_parallel_plan says {planned}")
    if unused:
        raise _wrong(directory, task, f"the tensor_parallel_plan names layers that are not there: {sorted(unused)}")


def _wrong(directory: ModelDirectory, task: str, what: str) -> ModelConfigError:
    return ModelConfigError(f"{directory.path}: {directory.spec}, task {task!r}: {what}")
