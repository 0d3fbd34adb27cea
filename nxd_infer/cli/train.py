"""``nxd-infer train``: run a recipe, or say what it would do."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

from nxd_infer.artifact.writer import ArtifactWriter
from nxd_infer.cli import trace
from nxd_infer.cli.console import console, table, verbatim
from nxd_infer.errors import RecipeError
from nxd_infer.recipes import launch, loop
from nxd_infer.recipes.convert import as_yaml, convert
from nxd_infer.recipes.dtypes import dtypes
from nxd_infer.recipes.experiment import Keeper, log_dir_of
from nxd_infer.recipes.loop import Outcome
from nxd_infer.recipes.models import obstacles
from nxd_infer.recipes.plan import CHIPS, UTILIZATION, Plan, plan_of
from nxd_infer.recipes.recipe import Loaded, load, world_size
from nxd_infer.recipes.speed import matmul_peak
from nxd_infer.recipes.yaml_text import read_yaml
from nxd_infer.util.processors import compute_threads
from nxd_infer.util.units import size


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
        show(plan_of(loaded, *machine(loaded, chip)))
        return
    outcome = train(loaded, file, overrides)
    if not first:
        return
    console.print(f"trained {loaded.recipe.name}: {outcome.log_dir}", markup=False, soft_wrap=True)
    if traced is not None:
        if loaded.recipe.model_alignment_strategy.peft is None:  # else its adapters are merged in the directory
            traced["checkpoint"] = str(outcome.checkpoints)
        trace.run(outcome.model, traced.pop("out"), **traced)


def print_converted(file: Path) -> None:
    """Print another trainer's configuration as a recipe, with what has no place in one at its end."""
    verbatim(as_yaml(*convert(read_yaml(file))))


def train(loaded: Loaded, file: Path, overrides: list[str]) -> Outcome:
    """Train as one of a launcher's ranks, in this process alone, or with a process per rank."""
    if launch.is_a_rank(os.environ):
        launch.check_world(loaded, os.environ)
        return loop.train(loaded)
    if world_size(loaded.recipe) == 1:
        return loop.train(loaded)
    for obstacle in obstacles(loaded):
        raise RecipeError(obstacle)
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
        where = loaded.tree.where(("trace",))
        raise RecipeError(f"{where}: trace.out is missing: the folder of the artifact, or use --trace OUT")
    return {"task": "generate", **given, "out": Path(out or given["out"])}


def say_unused(loaded: Loaded) -> None:
    """Name the keys that have no effect, once, by the reason."""
    for reason, keys in loaded.unused.items():
        console.print(f"note: no effect: {', '.join(keys)} ({reason})", markup=False, soft_wrap=True)


def machine(loaded: Loaded, chip: str | None) -> tuple[str | None, float]:
    """Return the device that a plan's time is for: a chip where the recipe has more ranks than this machine cores."""
    threads = compute_threads()
    if chip is None and loaded.recipe.trainer.devices > threads:
        chip = "trn2" if loaded.recipe.trainer.lnc else "trn1"
    if chip in CHIPS:
        return chip, 0.0
    return None, matmul_peak(dtypes(loaded.recipe).products) / max(1, min(loaded.recipe.trainer.devices, threads))


def show(plan: Plan) -> None:
    degrees = " x ".join(f"{name} {degree}" for name, degree in plan.degrees.items() if degree > 1) or "one rank"
    rows = [
        (
            "parameters",
            f"{plan.parameters:,}" + ("" if plan.trained == plan.parameters else f", {plan.trained:,} trained"),
        ),
        ("ranks", f"{plan.world}: {degrees}"),
        ("weights per rank", size(plan.weights)),
        ("gradients per rank", size(plan.gradients)),
        ("optimizer per rank", size(plan.optimizer)),
        ("activations per rank, about", size(plan.activations)),
        ("memory per rank, about", size(plan.memory)),
        ("tokens per step", f"{plan.tokens:,} in {plan.rows:,} rows, {plan.microbatches} passes per rank"),
        ("steps", "until the end of the data" if plan.steps is None else f"{plan.steps:,}"),
        ("estimated seconds per step", f"{plan.seconds:,.3g}"),
    ]
    if plan.steps is not None:
        rows.append(("estimated time", str(datetime.timedelta(seconds=round(plan.seconds * plan.steps)))))
    table("", ("plan", ""), rows)
    speed = f"{plan.peak / 1e12:,.2f} TFLOP/s"
    console.print(f"Times assume {UTILIZATION:.0%} of {speed} per rank, {plan.device}.", markup=False)
    for obstacle in plan.obstacles:
        console.print(f"cannot be trained here: {obstacle}", markup=False, soft_wrap=True)
