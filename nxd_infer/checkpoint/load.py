"""What loading a checkpoint changes in a job. Everything is read and checked before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.checkpoint.archive import Archive, adapter_of
from nxd_infer.checkpoint.contents import EXTRA, modules_with_extra_state, stage_of
from nxd_infer.checkpoint.load_optimizer import read_optimizer
from nxd_infer.checkpoint.neuronx.archive import AnyArchive, ReferenceArchive
from nxd_infer.context import AXES, ParallelContext
from nxd_infer.errors import CheckpointError, WeightMismatchError
from nxd_infer.layout import ParamLayout, WeightSource, check_weights, fill_tensor, load_weights, weight_layout
from nxd_infer.layout.files.values import pack
from nxd_infer.layout.merge import RunsSource
from nxd_infer.layout.sources import SelectedSource, named_tensors
from nxd_infer.modules.lora import LoRAModel
from nxd_infer.modules.nxd_model import local_module
from nxd_infer.optimizer.parallel import NxDOptimizer
from nxd_infer.optimizer.sharded_files import take_over
from nxd_infer.pipeline.stage import Stage

DATA = "dataloader"
OF_RANKS = {
    DATA: (
        "position in the data",
        "it was saved without dataloader=",
        "a trainer.data.ResumableLoader can go on at any",
    ),
    EXTRA: (
        "extra state of modules",
        "it was saved by a model without; pass strict=False to go on without",
        "pass strict=False to go on without",
    ),
}
"""What every rank saves for itself: what it is, the reason why there is none, and what to do at other degrees."""


def of_this_rank(archive: AnyArchive, context: ParallelContext, key: str) -> Any:
    """Return what this rank saved under a key of OF_RANKS; at other degrees what all ranks saved, if it is equal."""
    what, without, fix = OF_RANKS[key]

    def of(rank: int) -> Any:
        values = archive.value(rank, "values")
        if key not in values:
            raise CheckpointError(f"{archive.where} holds no {what}; {without}")
        return values[key]

    if same_degrees(archive, context):
        return of(context.rank)
    first, *others = (pack(of(rank)) for rank in range(math.prod(archive.degrees.values())))
    if any(other[0] != first[0] or not all(map(torch.equal, other[1].values(), first[1].values())) for other in others):
        raise CheckpointError(
            f"{archive.where} holds another {what} for each rank, so it goes on at the degrees of the save only, "
            f"{dict(archive.degrees)}; {fix}"
        )
    return of(0)


def same_degrees(archive: AnyArchive, context: ParallelContext) -> bool:
    return all(archive.degrees[axis] == context.axis(axis).degree for axis in AXES)


def extra_change(
    model: nn.Module, archive: AnyArchive, strict: bool, context: ParallelContext
) -> Callable[[], object] | None:
    """Return what restores modules with ``set_extra_state``. Raises CheckpointError if one has no saved state."""
    modules = modules_with_extra_state(local_module(model))
    if not modules or isinstance(archive, ReferenceArchive):
        return None
    try:
        states = of_this_rank(archive, context, EXTRA)
        missing = sorted(modules.keys() - states.keys())
        if missing and strict:
            raise CheckpointError(f"{archive.where} holds no extra state of {missing[:8]}; pass strict=False")
    except CheckpointError:
        if strict:
            raise
        return None

    def give() -> None:
        for name, module in modules.items():
            if name in states:
                module.set_extra_state(states[name])

    return give


def _whole(kind: str, archive: AnyArchive, context: ParallelContext) -> Any | None:
    """Return this rank's dictionary if one was saved instead of a module or an optimizer, else None."""
    parts = dict(archive.parts(kind))
    if not any("structure" in part for part in parts.values()):
        return None
    if not same_degrees(archive, context):
        raise CheckpointError(
            f"the {kind} of {archive.where} was saved as a dictionary at "
            f"{dict(archive.degrees)}; it can be loaded at these degrees only: save the "
            "object itself to load it at others"
        )
    first = context.rank - context.edp.rank * context.layout.stride("edp")
    rank = context.rank if context.rank in parts else first
    return archive.value(rank, kind)


def model_change(model: nn.Module, archive: AnyArchive, strict: bool, context: ParallelContext) -> Callable[[], object]:
    """Return what loads the model. Raises WeightMismatchError immediately, before any change, if it does not fit."""
    module, stage = local_module(model), stage_of(model)
    state = _whole("model", archive, context)
    if state is not None:
        return partial(load_state, "model, a dictionary,", module, state, strict=strict)
    if isinstance(archive, ReferenceArchive):
        if isinstance(module, LoRAModel):
            return _reference_adapter(module, archive, context)
        archive.know({**({} if stage is None else stage.layouts), **weight_layout(module)})
    source, degree, rank = _own_weights(archive, stage), context.tp.degree, context.tp.rank
    layouts, tensors, names = weight_layout(module), named_tensors(module), set(source.keys())
    if isinstance(module, LoRAModel):
        module.weights_of(source, strict)
        layouts, tensors = module.base_layouts, {module.base_name(name): tensor for name, tensor in tensors.items()}
    elif strict:
        check_weights(layouts, source)
    present = {name: layout for name, layout in layouts.items() if set(layout.logical_names) <= names}
    # Check a tied weight under each of its names that exist.
    check_weights({name: replace(one, alias_of=None) for name, one in present.items()}, source, strict=False)
    _require_equal_ties(present, tensors, source, context)
    if isinstance(module, LoRAModel):
        return partial(module.load_weights, source, rank, degree, strict, _is_merged(archive))
    if strict:
        return partial(load_weights, module, source, rank=rank, degree=degree)

    def fill() -> None:
        for name, layout in present.items():
            fill_tensor(tensors[name], source, layout.rank_layout(degree, rank))

    return fill


def _own_weights(archive: AnyArchive, stage: Stage | None) -> WeightSource:
    """The weights of a checkpoint but those of other pipeline stages."""
    source = RunsSource(archive.pieces("model"))
    if stage is None:
        return source
    others = stage.elsewhere(source.keys())
    return SelectedSource(source, lambda name: name not in others)


def _reference_adapter(model: LoRAModel, archive: ReferenceArchive, context: ParallelContext) -> Callable[[], None]:
    """Return what loads an adapter that the reference saved without the base weights, of the model's own options."""
    layouts, tensors = weight_layout(model.module), named_tensors(model.module)
    factors = {name: layouts[name] for name in layouts if name in model.adapter_names}
    archive.know(factors)
    source = RunsSource(archive.pieces("model"))
    check_weights(factors, source)

    def load() -> None:
        for name, layout in factors.items():
            fill_tensor(tensors[name], source, layout.rank_layout(context.tp.degree, context.tp.rank))

    return load


def _is_merged(archive: AnyArchive) -> bool:
    """Return whether the weights contain the adapter that was saved beside them."""
    if not isinstance(archive, Archive):
        return False
    return bool(archive.adapter_files()) and not adapter_of(RunsSource(archive.pieces("model")))[0]


def require_adapter(model: nn.Module, archive: AnyArchive) -> None:
    """Raise CheckpointError if the optimizer's state in ``archive`` belongs to an adapter merged into the weights.

    Loading both would start a new adapter on weights that already contain it, with moments that are not its own.
    """
    whole = any("pieces" in part for _, part in archive.parts("model"))
    if isinstance(local_module(model), LoRAModel) and whole and not adapter_of(RunsSource(archive.pieces("model")))[0]:
        raise CheckpointError(
            f"{archive.where} holds merged weights and no adapter beside them: merged checkpoints are for serving: "
            "resume from one that was saved with LoraConfig(save_lora_base=True, merge_lora=False), or load the model "
            "without the state of training (optimizer=None): its adapter has no effect then, and begins anew"
        )


def _require_equal_ties(
    layouts: Mapping[str, ParamLayout], tensors: Mapping[str, Tensor], source: WeightSource, context: ParallelContext
) -> None:
    """Raise WeightMismatchError if one weight of the model is two different ones in the checkpoint.

    ``layouts`` are those of the weights that are in ``source``.
    """
    for name, layout in layouts.items():
        first = layouts.get(layout.alias_of or "")
        if first is None:
            continue
        values = []
        for one in (layout, first):
            values.append(torch.zeros_like(tensors[name]))
            fill_tensor(values[-1], source, one.rank_layout(context.tp.degree, context.tp.rank))
        if not torch.equal(*values):
            raise WeightMismatchError(
                f"{name!r} and {layout.alias_of!r} are one weight in this model, and two different ones in the "
                "checkpoint: build the model without tying them"
            )


def load_state(what: str, target: Any, state: Any, **options: Any) -> None:
    """Call ``target.load_state_dict(state)``; its failures become CheckpointErrors that name ``what``."""
    try:
        target.load_state_dict(state, **options)
    except CheckpointError:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint's {what} does not fit this one: {error}") from error


def optimizer_change(
    optimizer: torch.optim.Optimizer, archive: AnyArchive, context: ParallelContext
) -> Callable[[], object]:
    """Return what loads the optimizer. Raises CheckpointError immediately, before any change, if it does not fit."""
    state = _whole("optimizer", archive, context)
    if state is not None:
        return partial(load_state, "optimizer, a dictionary,", optimizer, state)
    if not isinstance(optimizer, NxDOptimizer):
        raise CheckpointError(
            f"the checkpoint holds the state of a parallel optimizer, which a {type(optimizer).__name__} cannot take; "
            "make the optimizer with initialize_parallel_optimizer()"
        )
    optimizer.require_inited("load_checkpoint()")
    if isinstance(archive, ReferenceArchive):
        archive.know(optimizer.layouts, optimizer.names, optimizer.whole_group_names)
    return partial(take_over, optimizer, *read_optimizer(optimizer, archive, context))
