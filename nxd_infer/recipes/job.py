"""The parts of a training job on one rank: model, optimizer, learning rate, and where it begins."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from nxd_infer import hugging_face as hf
from nxd_infer.checkpoint.source import gather_weights
from nxd_infer.errors import WeightMismatchError
from nxd_infer.hugging_face.gguf_file import model_directory
from nxd_infer.hugging_face.quantized.formats import format_in
from nxd_infer.layout.files.atomic import replacing
from nxd_infer.modules.lora import LoRAModel
from nxd_infer.parallel_layers.sequence_parallel import building_sequence_parallel, is_sequence_parallel_model
from nxd_infer.recipes.models import (
    CONFIG,
    Dtypes,
    build,
    config_path,
    dtypes,
    lora_config,
    naming_targets,
    pipeline_options,
)
from nxd_infer.recipes.optim import OPTIMIZERS, optimizer_arguments, parameter_groups, scheduler_of
from nxd_infer.recipes.preference import with_preference
from nxd_infer.recipes.recipe import Loaded
from nxd_infer.recipes.schema import Dpo, Orpo
from nxd_infer.trainer import (
    NxDModel,
    NxDOptimizer,
    has_checkpoint,
    initialize_parallel_model,
    initialize_parallel_optimizer,
    load_checkpoint,
    neuronx_distributed_config,
)
from nxd_infer.trainer.first_rank import is_rank_zero
from nxd_infer.util.dtypes import dtype_name
from nxd_models import registry

OTHERWISE = {
    "resume_if_exists": "choose another exp_manager.name, or set exp_manager.resume_if_exists=false",
    "resume_from_checkpoint": "name a checkpoint of this model",
}
"""What to do about a checkpoint of another model, by the key that chose it."""


@dataclass(frozen=True)
class Begin:
    """Where a job's first start takes its weights from."""

    hugging_face: Path | None = None
    checkpoints: str | None = None


def begin_of(loaded: Loaded) -> Begin:
    """Return where the weights come from: ``resume_from_checkpoint``; in fine-tuning else the model's directory."""
    given = loaded.recipe.exp_manager.resume_from_checkpoint
    if given is not None and "://" in given:
        return Begin(checkpoints=given)
    if given is not None:
        path = model_directory(loaded.path(given))
        if path.is_dir() and (path / CONFIG).is_file() and any(path.glob("*.safetensors")):
            return Begin(hugging_face=path)
        if has_checkpoint(path):
            return Begin(checkpoints=str(path))
        raise loaded.tree.error(
            ("exp_manager", "resume_from_checkpoint"),
            f"= {given!r} is neither a folder of checkpoints nor a Hugging Face directory with safetensors",
        )
    config = config_path(loaded)
    tunes = not loaded.recipe.is_pretraining or loaded.recipe.model_alignment_strategy.peft is not None
    if tunes and config is not None and any(config.parent.glob("*.safetensors")):
        return Begin(hugging_face=config.parent)
    return Begin()


def notes_of_weights(loaded: Loaded) -> list[str]:
    """Return what is said of weights that a job begins with, if they are stored quantised."""
    folder = begin_of(loaded).hugging_face
    form = None if folder is None else format_in(folder)
    trained = dtype_name(dtypes(loaded.recipe).weights)
    return [] if form is None else [f"the weights in {folder} are stored as {form}, and trained as {trained}"]


def make_model(model_dir: Path, weights: Path | None, dtype: torch.dtype, strategy: Dpo | Orpo | None) -> nn.Module:
    """Build a causal language model, with the weights of a directory or new ones, for its loss or a preference's."""
    with torch.device("meta" if weights is not None else torch.get_default_device()):
        model = registry.build(model_dir, "generate", dtype, model_impl="native")
    if weights is not None:
        model = hf.weights.load(model, hf.weights.weights(weights))
    return model if strategy is None else with_preference(model, strategy)


def config_of(loaded: Loaded, model_dir: Path) -> dict[str, Any]:
    """Return the arguments of ``neuronx_distributed_config`` that a recipe stands for."""
    recipe, kinds = loaded.recipe, dtypes(loaded.recipe)
    strategy, clip = recipe.distributed_strategy, recipe.trainer.gradient_clip_val
    optimizer: dict[str, Any] = {"zero_one_enabled": strategy.zero1, "grad_clipping": clip > 0}
    if clip:
        optimizer["max_grad_norm"] = clip
    if recipe.bucket_size_collectives:
        optimizer["bucket_cap_mb"] = recipe.bucket_size_collectives
    peft = recipe.model_alignment_strategy.peft
    pipelined = strategy.pipeline_model_parallel_size > 1
    return {
        "tensor_parallel_size": strategy.tensor_model_parallel_size,
        "pipeline_parallel_size": strategy.pipeline_model_parallel_size,
        "expert_parallel_size": strategy.expert_model_parallel_size,
        "pipeline_config": pipeline_options(recipe) if pipelined else None,
        "optimizer_config": optimizer,
        "activation_checkpoint_config": _recomputed(loaded, model_dir),
        "sequence_parallel": strategy.sequence_parallel and strategy.tensor_model_parallel_size > 1,
        "model_init_config": {"sequential_move_factor": recipe.trainer.sequential_move_factor},
        "lora_config": None if peft is None else lora_config(peft),
        "mixed_precision_config": {
            "use_master_weights": kinds.master_weights,
            "use_fp32_grad_acc": kinds.fp32_grad_acc,
        },
    }


def _recomputed(loaded: Loaded, model_dir: Path) -> Any:
    """What is computed again in the backward pass: whole layers, or the classes of their attention."""
    granularity = loaded.recipe.model.activations_checkpoint_granularity
    if granularity != "selective":
        return granularity
    with torch.device("meta"):
        modules = list(build(json.loads((model_dir / CONFIG).read_text())).modules())
    return sorted({type(one) for one in modules if "attention" in type(one).__name__.lower()}, key=str) or "full"


@dataclass
class Job:
    """A model in training, on this rank."""

    model: NxDModel
    optimizer: NxDOptimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    kinds: Dtypes


def make_job(loaded: Loaded, model_dir: Path, begin: Begin, steps: int) -> Job:
    """Build the parts of a job that trains ``steps`` steps. Every rank calls it."""
    recipe = loaded.recipe
    config = neuronx_distributed_config(**config_of(loaded, model_dir))
    torch.manual_seed(recipe.seed)
    alignment = recipe.model_alignment_strategy
    kinds = dtypes(recipe)

    def make() -> nn.Module:
        made = make_model(model_dir, begin.hugging_face, kinds.weights, alignment.pairs)
        if building_sequence_parallel() and not is_sequence_parallel_model(made):
            problem = "= True, but no layer of this model splits sequences: set it to false"
            raise loaded.tree.error("distributed_strategy.sequence_parallel", problem)
        return made

    with naming_targets(loaded):
        model = initialize_parallel_model(config, make)
        if isinstance(adapted := model.local_module(), LoRAModel):
            adapted.require_mergeable()  # as the job's last step will
    optim = recipe.model.optim
    groups = parameter_groups(model, optim, recipe.model.do_layer_norm_weight_decay)
    optimizer = initialize_parallel_optimizer(config, OPTIMIZERS[optim.name], groups, **optimizer_arguments(optim))
    return Job(model, optimizer, scheduler_of(optimizer, optim, steps), kinds)


def load_begin(loaded: Loaded, job: Job, begin: Begin, weights_only: bool) -> None:
    """Load the checkpoint that a first start begins with: all of it, or its weights (also by ``weight_init_only``).

    A resumed job needs its weights too if it trains adapters: its own checkpoints hold the adapters alone.
    """
    if begin.checkpoints is None:
        return
    with fitting(loaded, "resume_from_checkpoint", begin.checkpoints):
        alone = weights_only or loaded.recipe.model.weight_init_only
        more = {} if alone else {"optimizer": job.optimizer, "scheduler": job.scheduler}
        load_checkpoint(begin.checkpoints, model=job.model, **more)


@contextlib.contextmanager
def fitting(loaded: Loaded, key: str, where: str) -> Iterator[None]:
    """Raise RecipeError with the line of ``exp_manager``'s key if the checkpoint ``where`` is of another model."""
    try:
        yield
    except WeightMismatchError as error:
        what = str(error).removeprefix("the weights do not belong to this model; ")
        problem = f"goes on from {where}, which does not fit this recipe's model ({what}): {OTHERWISE[key]}"
        raise loaded.tree.error(("exp_manager", key), problem) from None


def write_merged(model: NxDModel, folder: Path) -> None:
    """Write a model with adapters into its directory, with these merged in, for serving. Every rank calls it."""
    if not isinstance(model.local_module(), LoRAModel):
        return
    weights = gather_weights(model)
    if is_rank_zero():
        with replacing(folder / "model.safetensors") as temporary:
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, temporary)
