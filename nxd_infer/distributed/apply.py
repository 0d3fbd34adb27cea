"""Apply a plan: replace the modules of a transformers model by parallel layers, and fill them with this rank's part."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.checkpoint.peft_adapters import plain_name
from nxd_infer.context import current_context
from nxd_infer.distributed.model_plan import Heads, ModelPlan
from nxd_infer.distributed.regions import SEQUENCE_DIM, enter_once, split_sequence, sum_gradients
from nxd_infer.distributed.replace import Style, replace_modules
from nxd_infer.errors import ParallelConfigError
from nxd_infer.layout import check_weights, layout_of, restore_attributes, shard_tensor, weight_layout
from nxd_infer.layout.sources import SelectedSource, Weights, as_source, named_tensors
from nxd_infer.parallel_layers.base import ParallelLayer

PARALLELIZED = "the model is parallelized already: parallelize a model once, as transformers makes it"


def apply_plan(
    model: Any,
    plan: ModelPlan,
    *,
    weights: Weights | None = None,
    parallelize_embeddings: bool = True,
    sequence_parallel: bool = False,
    kv_size_multiplier: int | None = None,
    should_parallelize: Callable[[nn.Module], bool] | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """Split ``model``, in place, over the tensor-parallel ranks of the current context, and return it.

    Args:
        model: a model of transformers, on the host or (also in part) on the meta device.
        plan: how its modules are split; :func:`nxd_infer.distributed.plan_for` gives that of its configuration.
        weights: logical weights under the model's names, for what is on the meta device; default: the model's own.
        parallelize_embeddings: split embeddings and output layers of the vocabulary too, padded where they must be.
        sequence_parallel: between the layers each rank holds its piece of the sequence.
        kv_size_multiplier: places of each key/value head; None: the fewest that the ranks need.
        should_parallelize: of a module that the plan names, whether to split it; default: all of them.
        device: where the new layers' weights are put; None: where the old ones were.

    Names, and the logical shape of every weight, stay what they were: ``nxd_infer.layout.weight_layout(model)`` says
    what of them a rank holds. Gradients need nothing more: sums over ranks are part of the backward.

    Raises ParallelConfigError for options that the plan does not hold for, and ShardingError for heads that cannot be
    placed.
    """
    own = dict(model.state_dict(keep_vars=True))
    partial = split(
        model,
        plan,
        parallelize_embeddings=parallelize_embeddings,
        sequence_parallel=sequence_parallel,
        kv_size_multiplier=kv_size_multiplier,
        should_parallelize=should_parallelize,
    )
    fill(model, own if weights is None else weights, device=place_of(own, device))
    sum_gradients(model, partial, current_context())
    refuse_save_pretrained(model)
    return model


def refuse_save_pretrained(model: nn.Module) -> None:
    """Let ``save_pretrained`` of a model over several ranks raise: it would write this rank's part as the whole.

    With the whole weights as ``state_dict`` it writes those.
    """
    context = current_context()
    if context.tp.degree * context.pp.degree > 1:
        for module in model.modules():
            if hasattr(type(module), "save_pretrained"):
                module.__dict__["save_pretrained"] = functools.partial(_save_whole, module)


def _save_whole(module: Any, *args: Any, state_dict: Mapping[str, Tensor] | None = None, **options: Any) -> Any:
    if state_dict is None:
        raise ParallelConfigError(
            "save_pretrained() would write only this rank's part of the weights: call "
            "Parallelizer.save_model_sharded_checkpoint(model, DIR) on every rank, then run "
            "`nxd-infer ckpt consolidate DIR --out OUT`, which writes a directory for transformers"
        )
    check_weights(weight_layout(module), state_dict, strict=False)
    return type(module).save_pretrained(module, *args, state_dict=state_dict, **options)


def place_of(own: Mapping[str, Tensor], device: torch.device | str | None) -> torch.device | None:
    """Return where new weights are put: on ``device``, or where the model's own are."""
    if device is not None:
        return torch.device(device)
    return next((tensor.device for tensor in own.values() if not tensor.is_meta), None)


def split(
    model: Any,
    plan: ModelPlan,
    *,
    parallelize_embeddings: bool = True,
    sequence_parallel: bool = False,
    kv_size_multiplier: int | None = None,
    should_parallelize: Callable[[nn.Module], bool] | None = None,
) -> list[str]:
    """:func:`apply_plan` without weights: the new layers stay on the meta device, and :func:`fill` fills them.

    Returns the names of the whole weights whose gradients are partial sums, for :func:`sum_gradients` after that.
    """
    context = current_context()
    if sequence_parallel and not plan.sequence_parallel:
        raise ParallelConfigError(
            f"{model.config.model_type}: sequence parallelism is not possible; pass sequence_parallel_enabled=False"
        )
    heads = Heads.of(model.config, context.tp.degree, kv_size_multiplier)
    if context.tp.degree == 1:
        return []
    found = dict(_planned(model, plan, should_parallelize))
    if not parallelize_embeddings:
        found = {name: style for name, style in found.items() if style[0] not in ("vocabulary", "logits")}
    if any(isinstance(model.get_submodule(name), ParallelLayer) for name in found):
        raise ParallelConfigError(PARALLELIZED)
    found = _without_loose_ties(model, found)
    ties = _ties(model)
    replace_modules(model, found, heads, sequence_parallel)
    _tie(model, ties)
    return _enter_regions(model, found, plan, heads, sequence_parallel)


def _planned(
    model: nn.Module, plan: ModelPlan, should_split: Callable[[nn.Module], bool] | None
) -> Iterator[tuple[str, Style]]:
    for name, module in model.named_modules(remove_duplicate=False):
        style = plan.style_of(plain_name(name))
        if any(hasattr(module, inner) for inner in ("base_layer", "original_module")):  # PEFT's: what is in it is split
            continue
        if style is not None and (should_split is None or should_split(module)):
            yield name, style


# --- weights that are in the model several times ------------------------------------------------------------


def _ties(model: nn.Module) -> list[list[str]]:
    """Return the names of every parameter that has several."""
    places: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(weight), []).append(name)
    return [names for names in places.values() if len(names) > 1]


def _without_loose_ties(model: nn.Module, found: Mapping[str, Style]) -> dict[str, Style]:
    """Leave out the vocabulary's modules whose weight something else shares that is not split."""
    kept = dict(found)
    for names in _ties(model):
        owners = [name.rpartition(".")[0] for name in names if name.endswith(".weight")]
        if any(owner not in found for owner in owners):
            for owner in owners:
                kept.pop(owner, None)
    return kept


def _tie(model: nn.Module, ties: list[list[str]]) -> None:
    for names in ties:
        owners = [(model.get_submodule(path), own) for path, _, own in (name.rpartition(".") for name in names)]
        # A split weight wins: the others' modules were replaced too, or hold a bias that stays whole.
        first = next((owner for owner in owners if layout_of(*owner) is not None), owners[0])
        weight = getattr(*first)
        for owner, name in owners:
            if getattr(owner, name) is not weight:
                owner.register_parameter(name, weight)


# --- the borders of parallel regions -------------------------------------------------------------------------


def _enter_regions(
    model: nn.Module, found: Mapping[str, Style], plan: ModelPlan, heads: Heads, sequence_parallel: bool
) -> list[str]:
    context = current_context()
    partial: dict[int, nn.Parameter] = {}
    for name, (kind, _) in found.items():
        module = model.get_submodule(name)
        if kind in ("attention", "shared"):
            enter_once(module, context, sequence_parallel, SEQUENCE_DIM if kind == "attention" else 0)
        if kind == "attention":
            _set_sizes(module, heads)
        if kind == "sum":
            partial.update((id(weight), weight) for weight in module.parameters())
    if sequence_parallel:
        for _, layers in stacks_of(model, plan):
            split_sequence(layers[0], layers[-1], context)
            partial.update((id(weight), weight) for weight in _whole_weights(layers))
    return [name for name, weight in model.named_parameters() if id(weight) in partial]


def _set_sizes(module: Any, heads: Heads) -> None:
    """Tell an attention module how many heads this rank has."""
    for name, size in heads.sizes().items():
        if isinstance(getattr(module, name, None), int):
            setattr(module, name, size)
    config = getattr(module, "config", None)
    if config is not None:  # some read the number of heads there, at every call
        module.config = ConfigView(config, num_attention_heads=heads.placed.heads_per_rank)


def stacks_of(model: nn.Module, plan: ModelPlan) -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield the plan's lists of layers, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and any(name == s or name.endswith(f".{s}") for s in plan.stacks):
            yield name, module


def _whole_weights(layers: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the weights that every rank uses for its piece of the sequence only, and whose gradients are partial."""
    for module in layers.modules():
        if isinstance(module, ParallelLayer):  # sums those of its own
            continue
        yield from module.parameters(recurse=False)


class ConfigView:
    """Another configuration with a few values of its own.

    The model's configuration stays that of the whole model: it is saved, and says how weights are stored.
    """

    def __init__(self, config: Any, **own: Any):
        self.__dict__.update(own, _config=config)

    def __getattr__(self, name: str) -> Any:
        if name == "_config":  # while a copy is made, before it has its attributes
            raise AttributeError(name)
        return getattr(self._config, name)


def on_meta(model: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers without values, in the whole model's terms."""
    tensors = named_tensors(model)
    layouts = weight_layout(model).items()
    return [logical for name, layout in layouts if tensors[name].is_meta for logical in layout.logical_names]


def fill(model: nn.Module, weights: Weights, *, device: torch.device | None = None, strict: bool = True) -> None:
    """Replace what is on the meta device by this rank's part of ``weights``; the rest of the model stays as it is.

    ``device``: where new tensors are put; None: the host. ``strict``: raise WeightMismatchError for a weight that is
    missing, as for one of another shape; else it stays on the meta device.
    """
    here = current_context().tp
    layouts = weight_layout(model)
    tensors = named_tensors(model)
    source = as_source(weights)
    there = set(source.keys())
    empty = {
        name: layout
        for name, layout in layouts.items()
        if tensors[name].is_meta and (strict or there.issuperset(layout.logical_names))
    }
    names = {logical for layout in empty.values() for logical in layout.logical_names}
    source = SelectedSource(source, names.__contains__)
    check_weights(empty, source)
    made: dict[int, nn.Parameter] = {}
    for name, layout in empty.items():
        old = tensors[name]
        path, _, own = name.rpartition(".")
        owner = model.get_submodule(path)
        if id(old) in made:
            owner.register_parameter(own, made[id(old)])
            continue
        new = shard_tensor(source, layout.rank_layout(here.degree, here.rank), old.dtype, device)
        if isinstance(old, nn.Parameter):
            made[id(old)] = nn.Parameter(new, old.requires_grad)
            owner.register_parameter(own, made[id(old)])
        else:
            owner.register_buffer(own, new)
    restore_attributes(model)
