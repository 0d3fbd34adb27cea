"""Parallelizer: split a model, load it, and save its shards. One class for each model type, which differ in the plan.

Source: the documentation of Optimum Neuron Distributed, "Base Parallelizer" and "Selecting
Model-Specific Parallelizer Classes".
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer import comm
from nxd_infer.checkpoint.api import WORKERS, has_checkpoint, load_checkpoint, save_checkpoint
from nxd_infer.checkpoint.folder import SHARDS
from nxd_infer.checkpoint.peft_adapters import adapter_file
from nxd_infer.checkpoint.storage import Storage, storage_of
from nxd_infer.comm.launched import require_no_lonely_rank
from nxd_infer.comm.turns import in_turns
from nxd_infer.context import ParallelContext, current_context
from nxd_infer.distributed.adapters import split_adapters
from nxd_infer.distributed.apply import (
    PARALLELIZED,
    fill,
    on_meta,
    place_of,
    refuse_save_pretrained,
    split,
    stacks_of,
)
from nxd_infer.distributed.lazy import WEIGHTS, StoredWeights
from nxd_infer.distributed.model_plan import ModelPlan
from nxd_infer.distributed.optimizers import ParameterMap, optimizer_for
from nxd_infer.distributed.plan_registry import plan_for, plan_of_type, supported_types, unknown_type
from nxd_infer.distributed.regions import sum_gradients
from nxd_infer.errors import AdapterError, ParallelConfigError
from nxd_infer.layout import WeightSource
from nxd_infer.modules.lora.config import KEEPING_THE_BASE
from nxd_infer.modules.nxd_model import local_module
from nxd_infer.pipeline.model import NxDPPModel
from nxd_infer.pipeline.options import PipelineOptions
from nxd_infer.pipeline.stage import take_stage
from nxd_infer.util.devices import HOST

MAPPING, PARTIAL = "_nxd_parameter_map", "_nxd_partial_gradients"
"""Attributes of a parallelized model, and of one that :meth:`Parallelizer.parallelize` splits and fills later."""
Predicate = Callable[[nn.Module], bool]


class Parallelizer:
    """Splits models over the ranks of the current context. All methods are class methods.

    Derived classes name their ``model_type``; one may also override :meth:`plan` or :meth:`_parallelize`.
    """

    model_type: str = ""

    @classmethod
    def plan(cls, config: Any) -> ModelPlan:
        """Return how a model of ``config`` is split."""
        return plan_for(config)

    @classmethod
    def _parallelize(
        cls,
        model: Any,
        device: torch.device | None = None,
        parallelize_embeddings: bool = True,
        sequence_parallel_enabled: bool = False,
        should_parallelize_layer_predicate_func: Predicate | None = None,
        **parallel_layer_specific_kwargs: Any,
    ) -> Any:
        """Replace the layers of ``model`` by parallel ones; arguments as of :meth:`parallelize`.

        The new layers have this rank's part of the weights, on ``device`` or where the model's own are. (Called by
        :meth:`parallelize`, which loads them after it, they stay on the meta device.) The predicate says whether to
        split a module that the plan names; ``kv_size_multiplier`` is the one further keyword.

        Returns the model. Raises ParallelConfigError for a keyword that no layer has and for a model that is
        parallelized already, and WeightMismatchError if weights are not stored.
        """
        multiplier = parallel_layer_specific_kwargs.pop("kv_size_multiplier", None)
        if parallel_layer_specific_kwargs:
            raise ParallelConfigError(
                f"no parallel layer takes {', '.join(parallel_layer_specific_kwargs)}; known is kv_size_multiplier"
            )
        own = _with_values(model)
        partial = split(
            model,
            cls.plan(model.config),
            parallelize_embeddings=parallelize_embeddings,
            sequence_parallel=sequence_parallel_enabled,
            kv_size_multiplier=multiplier,
            should_parallelize=should_parallelize_layer_predicate_func,
        )
        partial = [*partial, *split_adapters(model)]
        if PARTIAL in vars(model):
            setattr(model, PARTIAL, partial)
            return model
        _load(model, own, place_of(own, device))
        if device is not None:
            model.to(device)
        sum_gradients(model, partial, current_context())
        return model

    @classmethod
    def parallelize(
        cls,
        model: Any,
        device: torch.device | str | None = None,
        parallelize_embeddings: bool = True,
        sequence_parallel_enabled: bool = False,
        kv_size_multiplier: int | None = None,
        pipeline_parallel_input_names: list[str] | tuple[str, ...] | None = None,
        pipeline_parallel_num_microbatches: int = 1,
        pipeline_parallel_use_zero1_optimizer: bool = False,
        pipeline_parallel_gradient_checkpointing_enabled: bool = False,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        num_local_ranks_per_step: int = 8,
    ) -> Any:
        """Split ``model``, in place, over the current context's ranks, and load this rank's part. Every rank calls it.

        Args:
            model: a model of transformers, or a PEFT model of one; loaded lazily, each rank reads only its part.
            device: where the model is put, each rank's part of it; None: where it is, or the host.
            parallelize_embeddings: split the vocabulary too; it is padded where it does not divide.
            sequence_parallel_enabled: between layers, each rank holds a piece of the sequence.
            kv_size_multiplier: places of each key/value head; None: the fewest that the ranks need.
            pipeline_parallel_input_names: the inputs of a batch; None: the parameters of the model's forward.
            pipeline_parallel_num_microbatches: parts that a batch is split into.
            pipeline_parallel_use_zero1_optimizer: the optimizer averages gradients over data-parallel ranks.
            pipeline_parallel_gradient_checkpointing_enabled: compute the layers' activations again in the backward.
            checkpoint_dir: a folder of :meth:`save_model_sharded_checkpoint` whose weights are loaded.
            num_local_ranks_per_step: ranks of a host that load at the same time; 0 or less: all.

        Returns the model; with pipeline ranks an :class:`~nxd_infer.pipeline.NxDPPModel` of it. Weights that were not
        stored are initialised, the same on all ranks. Raises ModelConfigError for a model without a plan, and
        ParallelConfigError for one that is parallelized already.
        """
        require_no_lonely_rank("parallelize")
        context = current_context()
        if MAPPING in vars(local_module(model)):
            raise ParallelConfigError(PARALLELIZED)
        before = dict(model.named_parameters(remove_duplicate=False))
        stored: StoredWeights | None = getattr(model, WEIGHTS, None)
        if stored is not None:
            here = stored.view(on_meta(model))
            initialise(model, _lacking(model, here), context)
        own = _with_values(model)
        setattr(model, PARTIAL, [])  # the weights, of this rank's stage only, follow below
        try:
            model = cls._parallelize(
                model,
                None,
                parallelize_embeddings,
                sequence_parallel_enabled,
                kv_size_multiplier=kv_size_multiplier,
            )
        finally:
            partial = vars(model).pop(PARTIAL, ())
        result = model
        if context.pp.degree > 1:
            if pipeline_parallel_gradient_checkpointing_enabled:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            result = pipelined(
                model,
                cls.plan(model.config),
                {
                    "num_microbatches": pipeline_parallel_num_microbatches,
                    "use_zero1_optimizer": pipeline_parallel_use_zero1_optimizer,
                    "input_names": pipeline_parallel_input_names,
                },
            )
        load = functools.partial(_load, model, own, place_of(own, device))
        in_turns(context, num_local_ranks_per_step, load, of_host=True)
        if device is not None:
            model.to(device)  # norms, buffers and other things that are not split
        sum_gradients(model, partial, context)
        model.__dict__.pop(WEIGHTS, None)
        refuse_save_pretrained(model)
        setattr(model, MAPPING, ParameterMap(before, dict(model.named_parameters(remove_duplicate=False))))
        if checkpoint_dir is not None:
            cls.load_model_sharded_checkpoint(result, checkpoint_dir)
        return result

    @classmethod
    def optimizer_for_mp(
        cls, optimizer: torch.optim.Optimizer, orig_param_to_parallel_param_on_xla: Mapping[int, nn.Parameter]
    ) -> torch.optim.Optimizer:
        """Return the optimizer for the parallelized parameters.

        An optimizer of :func:`make_optimizer_constructor_lazy` is made as it was written. Of another one, the groups
        and their options are kept; it is returned itself if none of its parameters has changed.

        Args:
            optimizer: one that has made no step yet.
            orig_param_to_parallel_param_on_xla: the parallel parameter by the ``id`` of the original one, as
                :func:`parameter_mapping` gives it. Parameters that it lacks are left out.
        """
        return optimizer_for(optimizer, orig_param_to_parallel_param_on_xla)

    @classmethod
    def save_model_sharded_checkpoint(
        cls,
        model: nn.Module,
        output_dir: str | os.PathLike[str],
        optimizer: torch.optim.Optimizer | None = None,
        use_xser: bool = True,
        async_save: bool = False,
        num_local_ranks_per_step: int = 8,
    ) -> None:
        """Save the ranks' shards as the checkpoint ``shards`` of ``output_dir``, and the configuration beside it.

        Args:
            model: a parallelized model. Every rank calls it with the same shared ``output_dir``.
            optimizer: is saved too.
            use_xser: all ranks write at the same time, whatever ``num_local_ranks_per_step`` is. (The files are
                safetensors in any case.)
            async_save: return once the tensors are copied, and write in the background; the next save, a load and
                ``nxd_infer.trainer.wait_for_save`` wait for it. All ranks write at the same time.
            num_local_ranks_per_step: ranks that write at the same time without ``use_xser``; 0 or less: all.

        ``nxd-infer ckpt consolidate`` makes a directory for transformers of it. Raises CheckpointError if a rank cannot
        write, and ParallelConfigError for a model that is not parallelized.
        """
        parameter_mapping(model)  # raises
        at_once = num_local_ranks_per_step
        save_checkpoint(
            output_dir,
            SHARDS,
            model=model,
            optimizer=optimizer,
            num_workers=min(at_once, WORKERS[-1]) if at_once > 0 else WORKERS[0],
            use_xser=use_xser or at_once <= 0,
            async_save=async_save,
        )
        if current_context().rank == 0:
            _save_config(local_module(model), storage_of(output_dir))

    @classmethod
    def load_model_sharded_checkpoint(cls, model: nn.Module, load_dir: str | os.PathLike[str]) -> None:
        """Load the weights that :meth:`save_model_sharded_checkpoint` saved, at the same or other degrees.

        ``load_dir`` is the folder that it was given, or the folder ``shards`` in it. Raises CheckpointError if there is
        none, and ParallelConfigError for a model that is not parallelized.
        """
        parameter_mapping(model)  # raises
        folder = os.fspath(load_dir).rstrip("/")
        parent, tag = os.path.split(folder)
        if tag == SHARDS and not has_checkpoint(folder, SHARDS):
            folder = parent or "."
        load_checkpoint(folder, SHARDS, model=model)


def _with_values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if not tensor.is_meta}


def _load(model: nn.Module, own: Mapping[str, Tensor], place: torch.device | None) -> None:
    """Fill what is on the meta device with this rank's part of its ``own`` weights, and of those in files."""
    stored: StoredWeights | None = getattr(model, WEIGHTS, None)
    fill(model, own, device=place, strict=stored is None)
    if stored is not None:
        fill(model, stored.view(on_meta(model)), device=place)


def parameter_mapping(model: nn.Module) -> Mapping[int, nn.Parameter]:
    """Return the parallel parameter by the ``id`` of the original one, of a parallelized ``model``.

    Raises ParallelConfigError for another model.
    """
    mapping = local_module(model).__dict__.get(MAPPING)
    if mapping is None:
        raise ParallelConfigError("The model needs to be parallelized first: call Parallelizer.parallelize(model)")
    return mapping


def _save_config(model: Any, storage: Storage) -> None:
    """Write what transformers, and PEFT, need beside weights."""
    adapters = getattr(model, "peft_config", {})
    base = model.get_base_model() if adapters else model
    files = {"config.json": {**base.config.to_diff_dict(), "architectures": [type(base).__name__]}}
    if getattr(base, "generation_config", None) is not None:
        files["generation_config.json"] = base.generation_config.to_diff_dict()
    for name, config in adapters.items():
        files[adapter_file(name)] = config.to_dict()
        if config.init_lora_weights not in KEEPING_THE_BASE:  # PEFT would change the base again, which is saved changed
            files[adapter_file(name)]["init_lora_weights"] = True
    for name, content in files.items():
        storage.write(name, json.dumps(content, indent=2, default=_as_json).encode())


def _as_json(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(getattr(value, "value", value))


def _lacking(model: nn.Module, stored: WeightSource) -> list[str]:
    """Return the parameters on the meta device that have no stored weights under any of their names."""
    there = set(stored.keys())
    known = {id(weight) for name, weight in model.named_parameters(remove_duplicate=False) if name in there}
    return [name for name, weight in model.named_parameters() if weight.is_meta and id(weight) not in known]


def pipelined(model: nn.Module, plan: ModelPlan, given: Mapping[str, Any]) -> NxDPPModel:
    """Reduce ``model`` to this rank's stage, with as many layers on each stage as on the others, and wrap it.

    Raises ParallelConfigError if the plan cannot be cut or has fewer layers than there are stages.
    """
    pp = current_context().pp
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if not plan.pipeline_parallel:
        raise ParallelConfigError(f"{kind}: pipeline parallelism is not possible; use pipeline_parallel_size=1")
    layers = [f"{name}.{number}" for name, stack in stacks_of(model, plan) for number in range(len(stack))]
    if len(layers) < pp.degree:
        raise ParallelConfigError(
            f"{kind}: {len(layers)} layers cannot be on {pp.degree} pipeline stages; use at most {len(layers)}"
        )
    cuts = [layers[len(layers) * stage // pp.degree - 1] for stage in range(1, pp.degree)]
    options = PipelineOptions({**given, "pipeline_cuts": cuts})
    return NxDPPModel.of_stage(model, take_stage(model, cuts, pp.rank, pp.degree), {"pipeline_config": options})


logger = logging.getLogger(__name__)
_FACTOR = re.compile(r"\.lora_(?P<which>[AB])\.(?P<adapter>[^.]+)$")


def initialise(model: Any, names: Iterable[str], context: ParallelContext) -> None:
    """Give the parameters called ``names``, which are on the meta device, their initial values in ``model``.

    They are those of the first rank everywhere. A collective.
    """
    owners: dict[str, list[str]] = {}
    for name in names:
        path, _, own = name.rpartition(".")
        owners.setdefault(path, []).append(own)
    for path, lacking in owners.items():
        owner = model.get_submodule(path)
        drawn = _initialised(model, path, owner)
        for own in lacking:
            value = getattr(drawn, own).detach()
            for axis in ("tp", "dp", "cp", "pp"):
                value = comm.broadcast(value, context, axis)
            _replace(model, getattr(owner, own), value)
    drawn_here = sorted(path for path in owners if not _FACTOR.search(path))
    if drawn_here:
        logger.warning("the files have no weights for %s: they are initialised", ", ".join(drawn_here))


def _initialised(model: Any, path: str, owner: nn.Module) -> nn.Module:
    made = copy.deepcopy(owner).to_empty(device=HOST, recurse=False)
    for marked in (made, *made.parameters(recurse=False)):
        if hasattr(marked, "_is_hf_initialized"):  # or transformers would skip it
            delattr(marked, "_is_hf_initialized")
    with torch.no_grad():
        if (factor := _FACTOR.search(path)) is None:
            model._init_weights(made)
        else:
            _initialise_factor(made, factor, model.peft_config[factor["adapter"]].init_lora_weights)
    return made


def _initialise_factor(made: Any, factor: re.Match[str], how: Any) -> None:
    """Draw a factor of LoRA as PEFT does."""
    if how not in (True, "gaussian"):
        raise AdapterError(
            f"init_lora_weights={how!r} needs the weights of the model; load it without lazy_load_for_parallelism()"
        )
    if factor["which"] == "B":
        nn.init.zeros_(made.weight)
    elif how == "gaussian":
        nn.init.normal_(made.weight, std=1 / made.out_features)
    else:
        nn.init.kaiming_uniform_(made.weight, a=math.sqrt(5))
    if made.bias is not None:
        nn.init.zeros_(made.bias)


def _replace(model: nn.Module, old: nn.Parameter, value: torch.Tensor) -> None:
    """Put ``value`` in all places of ``old``."""
    new = nn.Parameter(value, old.requires_grad)
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is old:
                module.register_parameter(name, new)


class ParallelizersManager:
    """Finds the :class:`Parallelizer` of a model, by the ``model_type`` of its configuration."""

    @classmethod
    def get_supported_model_types(cls) -> list[str]:
        """Return the model types that can be parallelized, in alphabetical order."""
        return supported_types()

    @classmethod
    def is_model_supported(cls, model_type_or_model: Any) -> tuple[bool, bool, bool]:
        """Return whether tensor, sequence and pipeline parallelism can be used for a model or a model type."""
        kind = _type_of(model_type_or_model)
        if kind not in supported_types():
            return (False, False, False)
        plan = plan_of_type(kind)
        return (True, plan.sequence_parallel, plan.pipeline_parallel)

    @classmethod
    def parallelizer_for_model(cls, model_type_or_model: Any) -> type[Parallelizer]:
        """Return the parallelizer of a model or a model type.

        Raises ModelConfigError, with the supported types, if there is none.
        """
        kind = _type_of(model_type_or_model)
        if kind not in supported_types():
            raise unknown_type(kind)
        return _class_of(kind)


@functools.cache
def _class_of(kind: str) -> type[Parallelizer]:
    name = "".join(part.capitalize() for part in kind.split("_"))
    return type(f"{name}Parallelizer", (Parallelizer,), {"model_type": kind})


def _type_of(model_type_or_model: Any) -> str:
    if isinstance(model_type_or_model, str):
        return model_type_or_model
    return model_type_or_model.config.model_type
