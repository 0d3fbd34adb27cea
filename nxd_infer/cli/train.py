"""``nxd-infer train``: run a recipe, or say what it would do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from nxd_infer.artifact.writer import ArtifactWriter
from nxd_infer.cli import recipe_plan, trace
from nxd_infer.cli.console import console, verbatim
from nxd_infer.recipes import launch, loop
from nxd_infer.recipes.checks import require_trainable, slow_products
from nxd_infer.recipes.convert import as_yaml, convert
from nxd_infer.recipes.experiment import Keeper, log_dir_of
from nxd_infer.recipes.job import notes_of_weights
from nxd_infer.recipes.loop import Outcome
from nxd_infer.recipes.recipe import Loaded, load
from nxd_infer.recipes.schema import Recipe
from nxd_infer.recipes.yaml_text import read_yaml
from nxd_infer.util.devices import has_accelerator
from nxd_infer.util.options import table


def run(file: Path, overrides: list[str], check: bool, chip: str | None, trace_out: Path | None) -> None:
    """Read the recipe; print its plan with ``check``, else train, and trace what was trained if that is wanted."""
    os.environ.update(launch.variables_of_slurm(os.environ))
    first = os.environ.get("RANK", "0") == "0"
    loaded = load(file, overrides)
    traced = trace_arguments(loaded, trace_out)
    if traced is not None:
        ArtifactWriter(traced["out"]).check_target()
    if first:
        say_unused(loaded)
    if check:
        recipe_plan.show(loaded, chip)
        return
    for note in [*slow_products(loaded), *notes_of_weights(loaded)] if first else []:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    outcome = train(loaded, file, overrides)
    if first and traced is not None:
        if loaded.recipe.model_alignment_strategy.peft is None:  # else its adapters are merged in the directory
            traced["checkpoint"] = str(outcome.checkpoints)
        trace.run(outcome.model, traced.pop("out"), **traced)


def print_keys() -> None:
    """Print the keys of a recipe, with their defaults and what they do."""
    verbatim(table(Recipe, "key", python=False), end="\n")


def print_converted(file: Path) -> None:
    """Print another trainer's configuration as a recipe, with what has no place in one at its end."""
    verbatim(as_yaml(*convert(read_yaml(file))))


def train(loaded: Loaded, file: Path, overrides: list[str]) -> Outcome:
    """Train as one of a launcher's ranks, in this process alone, or with a process per rank."""
    if launch.is_a_rank(os.environ):
        launch.check_world(loaded, os.environ)
        return loop.train(loaded, console=console)
    if loaded.recipe.world_size == 1 and not has_accelerator():  # which is a rank's, as of several ranks
        return loop.train(loaded, console=console)
    require_trainable(loaded)
    log_dir = log_dir_of(loaded.recipe.exp_manager)
    try:
        launch.start_ranks(loaded, file, overrides, log_dir)
    finally:
        console.show_cursor()  # a killed rank leaves it hidden
    keeper = Keeper(loaded.recipe.exp_manager.checkpoint_callback_params, log_dir)
    return Outcome(log_dir, log_dir / loop.MODEL, keeper.folder)


def trace_arguments(loaded: Loaded, out: Path | None) -> dict[str, Any] | None:
    """Return the arguments of the trace that the recipe or the command wants; None if neither does."""
    given = dict(loaded.recipe.trace or {})
    if out is None and not given:
        return None
    if out is None and given.get("out") is None:
        raise loaded.tree.error("trace.out", "is missing: the folder of the artifact, or use --trace OUT")
    return {"task": "generate", "model_name": loaded.recipe.name, **given, "out": Path(out or given["out"])}


def say_unused(loaded: Loaded) -> None:
    """Name the keys that have no effect, once, by the reason."""
    for reason, keys in loaded.unused.items():
        console.print(f"note: no effect: {', '.join(keys)} ({reason})", markup=False, soft_wrap=True)
