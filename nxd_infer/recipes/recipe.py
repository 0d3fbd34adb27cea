"""Load a recipe: read the file, set what the command line overrides, resolve references, check keys and agreement."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nxd_infer.recipes.keys import LARGEST, Reader
from nxd_infer.recipes.resolve import override, resolve
from nxd_infer.recipes.schema import Recipe
from nxd_infer.recipes.yaml_text import Tree, read_yaml
from nxd_infer.trace.options import TraceOptions
from nxd_infer.util.options import declared
from nxd_infer.util.suggest import nearest
from nxd_models.serving.task_options import TaskOptions

SAID_BY_CONFIG = (
    "activation",
    "normalization",
    "position_embedding_type",
    "transformer_block_type",
    "make_vocab_size_divisible_by",
)
"""Keys of the section ``model`` that are for a model without ``model_config``."""
LENGTHS = ("encoder_seq_length", "seq_length")
"""Keys of the section ``model`` for which ``data.seq_length`` stands, too."""
TRACE_KEYS = ("out", *declared(TaskOptions), *declared(TraceOptions))


@dataclass(frozen=True)
class Loaded:
    """A recipe that was read and checked."""

    recipe: Recipe
    tree: Tree
    unused: dict[str, list[str]]
    """The given keys without an effect, by the reason."""

    def path(self, text: str) -> Path:
        """Return a path of the recipe: relative to the current directory, or to the recipe's where it is there."""
        here, there = Path(text), Path(self.tree.origin).parent / text
        return there if not here.exists() and there.exists() else here


def load(file: str | Path, overrides: Iterable[str] = ()) -> Loaded:
    """Read and check a recipe. Raises RecipeError with file, line, key, and the nearest that is valid."""
    return check(read_yaml(file), overrides)


def check(tree: Tree, overrides: Iterable[str] = ()) -> Loaded:
    """Check what was read; ``tree`` becomes the resolved one."""
    override(tree, overrides)
    data = tree.values.get("data")
    if isinstance(data, dict) and isinstance(data.get("alignment_strategy"), dict):  # another place of the same section
        tree.values.setdefault("model_alignment_strategy", data.pop("alignment_strategy"))
    reader = Reader(tree)
    reader.require_keys(Recipe, tree.values)  # a misspelt key would break the references to it
    resolve(tree)
    reader.require_keys(Recipe, tree.values)  # also of sections that are references
    recipe = reader.read(Recipe, tree.values)
    for name in recipe.trace or {}:
        if name not in TRACE_KEYS:
            raise tree.error(("trace", name), f"is not an argument of a trace{nearest(name, TRACE_KEYS)}")
    for agree in (_end, _degrees, _batches, _lengths, _heads, _rates, _experts, _alignment, _sources):
        agree(recipe, tree)
    given = [f"model.{name}" for name in SAID_BY_CONFIG if (tree.values.get("model") or {}).get(name) is not None]
    if recipe.model.model_config is not None and given:
        reader.unused["model.model_config says it"] = given
    if recipe.data.seq_length is not None:
        longer = [
            f"model.{name}" for name in LENGTHS if getattr(recipe.model, name) not in (None, recipe.data.seq_length)
        ]
        if longer:
            reader.unused["data.seq_length says how long rows are"] = longer
    return Loaded(recipe, tree, reader.unused)


def time_limit(loaded: Loaded) -> float:
    """Return how many seconds this start of the job may train; infinity without a limit."""
    limits = (seconds_of(value, loaded.tree, key) for key, value in _limits(loaded.recipe).items())
    return min((limit for limit in limits if limit is not None), default=math.inf)


def nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of ``number`` that is nearest to ``wanted``."""
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return min([*small, *(number // one for one in small)], key=lambda one: (abs(one - wanted), one))


# --- what values must be together ---------------------------------------------------------------------------


def _degrees(recipe: Recipe, tree: Tree) -> None:
    world, strategy = recipe.world_size, recipe.distributed_strategy
    before = 1
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        degree = getattr(strategy, name)
        if world % (before * degree):
            whose = f"= {degree}, x {before} of the degrees before it," if before > 1 else f"= {degree}"
            ranks = f"{world} ranks (trainer.devices x trainer.num_nodes)"
            close = nearest_divisor(world // before, degree)
            problem = f"{whose} does not divide the {ranks}; the nearest is {close}"
            raise tree.error(f"distributed_strategy.{name}", problem)
        before *= degree
    stages = strategy.virtual_pipeline_model_parallel_size
    if stages > 1 and strategy.pipeline_model_parallel_size == 1:
        problem = f"= {stages} needs pipeline_model_parallel_size above 1; without it the nearest is 1"
        raise tree.error("distributed_strategy.virtual_pipeline_model_parallel_size", problem)


def _batches(recipe: Recipe, tree: Tree) -> None:
    data, dp = recipe.data, recipe.data_parallel_size
    rows = data.micro_batch_size * dp
    if data.global_batch_size % rows:
        close = max(rows, round(data.global_batch_size / rows) * rows)
        problem = f"is not a multiple of micro_batch_size x data-parallel ranks = {data.micro_batch_size} x {dp}"
        raise tree.error("data.global_batch_size", f"= {data.global_batch_size} {problem}; the nearest is {close}")


def _lengths(recipe: Recipe, tree: Tree) -> None:
    length, model = recipe.seq_length, recipe.model
    if recipe.data.seq_length is None and model.seq_length not in (None, length):
        problem = f"= {model.seq_length} differs from model.encoder_seq_length; the nearest is {length}"
        raise tree.error("model.seq_length", problem)
    longest = model.max_position_embeddings
    if longest is not None and longest < length:
        problem = f"= {longest} is less than the {length} tokens per row; the nearest is {length}"
        raise tree.error("model.max_position_embeddings", problem)
    degree = recipe.distributed_strategy.tensor_model_parallel_size
    if recipe.distributed_strategy.sequence_parallel and length % degree:
        close = max(1, round(length / degree)) * degree
        problem = f"= {length} does not divide over the {degree} ranks of sequence_parallel; the nearest is {close}"
        raise tree.error("data.seq_length" if recipe.data.seq_length else "model.encoder_seq_length", problem)


def _heads(recipe: Recipe, tree: Tree) -> None:
    hidden, heads, groups = (
        getattr(recipe.model, name) for name in ("hidden_size", "num_attention_heads", "num_kv_heads")
    )
    if hidden and heads and not recipe.model.kv_channels and hidden % heads:
        close = nearest_divisor(hidden, heads)
        problem = f"= {heads} does not divide hidden_size {hidden}; the nearest is {close}"
        raise tree.error("model.num_attention_heads", problem)
    if heads and groups and heads % groups:
        problem = f"= {groups} does not divide {heads} attention heads; the nearest is {nearest_divisor(heads, groups)}"
        raise tree.error("model.num_kv_heads", problem)


def _rates(recipe: Recipe, tree: Tree) -> None:
    optim, sched = recipe.model.optim, recipe.model.optim.sched
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        problem = f"= {optim.betas} must be two numbers from 0 to below 1; the nearest is [0.9, 0.999]"
        raise tree.error("model.optim.betas", problem)
    if sched is None or ("trainer", "max_steps") in tree.commanded:  # a shortened run may be all warmup
        return
    total = sched.max_steps or recipe.trainer.max_steps
    if 0 < total < sched.warmup_steps:
        problem = f"= {sched.warmup_steps} is above the {total} steps; the nearest is {total}"
        raise tree.error("model.optim.sched.warmup_steps", problem)


def _experts(recipe: Recipe, tree: Tree) -> None:
    moe, experts = recipe.model.moe, recipe.distributed_strategy.expert_model_parallel_size
    ranks, capacity = "distributed_strategy.expert_model_parallel_size", "model.moe.capacity_factor"
    if recipe.data_parallel_size % experts:
        close = nearest_divisor(recipe.data_parallel_size, experts)
        problem = f"does not divide the {recipe.data_parallel_size} data parallel ranks"
        raise tree.error(ranks, f"= {experts} {problem}; the nearest is {close}")
    if moe is None:
        if experts > 1 and recipe.model.model_config is None:
            raise tree.error(ranks, f"= {experts} needs a section model.moe; without it the nearest is 1")
        return
    if moe.dropless and moe.capacity_factor:
        raise tree.error(capacity, f"= {moe.capacity_factor:g} drops tokens, but dropless is true; the nearest is 0.0")
    if not moe.dropless and not moe.capacity_factor:
        raise tree.error(capacity, "= 0.0 needs dropless: true; the nearest is 1.0")
    if moe.top_k > moe.num_experts:
        raise tree.error("model.moe.top_k", f"= {moe.top_k} is above num_experts; the nearest is {moe.num_experts}")
    if moe.num_experts % experts:
        close = nearest_divisor(moe.num_experts, experts)
        raise tree.error(ranks, f"= {experts} does not divide the {moe.num_experts} experts; the nearest is {close}")


def _alignment(recipe: Recipe, tree: Tree) -> None:
    alignment, length = recipe.model_alignment_strategy, recipe.seq_length
    given = {name: one for name in ("sft", "dpo", "orpo") if (one := getattr(alignment, name)) is not None}
    if len(given) > 1:
        first, second, *_ = given
        problem = f"cannot be together with {first}; the nearest is {first} alone"
        raise tree.error(f"model_alignment_strategy.{second}", problem)
    for name, strategy in given.items():
        longest = getattr(strategy, "max_prompt_length", None)
        if longest is not None and longest >= length:
            problem = f"= {longest} leaves no room for an answer in {length} tokens; the nearest is {length - 1}"
            raise tree.error(f"model_alignment_strategy.{name}.max_prompt_length", problem)


def _sources(recipe: Recipe, tree: Tree) -> None:
    data = recipe.data
    if data.train_dir is None and not data.data_prefix:
        raise tree.error("data.train_dir", "is missing: give a file or folder to train on (or data_prefix)")
    if data.train_dir is not None and data.data_prefix:
        raise tree.error("data.data_prefix", "cannot be together with train_dir; the nearest is train_dir alone")
    if data.val_dir is not None and data.data_prefix:
        problem = "cannot be together with data_prefix, whose validation is splits_string's second share; remove it"
        raise tree.error("data.val_dir", problem)


def _end(recipe: Recipe, tree: Tree) -> None:
    trainer = recipe.trainer
    if trainer.max_steps < 0 and trainer.max_epochs < 0 and trainer.max_time is None:
        raise tree.error("trainer.max_steps", "is missing: the training would not end; give it, or max_epochs")
    if trainer.max_steps == 0:
        raise tree.error("trainer.max_steps", "= 0 trains nothing; the nearest is 1")
    for name, what in (("limit_val_batches", "batches"), ("val_check_interval", "steps")):
        limit = getattr(trainer, name)
        number = isinstance(limit, int | float) and not isinstance(limit, bool)
        if limit is not None and not (number and 0 <= limit < LARGEST):
            problem = f"must be a number of {what}, or a share of them, got {limit!r}; the nearest is 1.0"
            raise tree.error(f"trainer.{name}", problem)
    for key, value in _limits(recipe).items():
        seconds_of(value, tree, key)


def _limits(recipe: Recipe) -> dict[str, object]:
    """What limits the time, by its key."""
    return {
        "trainer.max_time": recipe.trainer.max_time,
        "exp_manager.max_time_per_run": recipe.exp_manager.max_time_per_run,
    }


def seconds_of(value: object, tree: Tree, key: str) -> float | None:
    """Return a time limit: seconds, or a text ``days:hours:minutes:seconds``."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LARGEST:
        return float(value)
    parts = str(value).split(":")
    if not 1 <= len(parts) <= 4 or not all(part.isdecimal() and len(part) < 12 for part in parts):
        raise tree.error(key, f'= {value!r} is not a time; the nearest is "00:01:00:00" (days:hours:minutes:seconds)')
    scale = (86400, 3600, 60, 1)[-len(parts) :]
    return float(sum(int(part) * unit for part, unit in zip(parts, scale, strict=True)))
