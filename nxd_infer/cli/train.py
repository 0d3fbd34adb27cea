"""``nxd-infer train``: run a recipe, or say what it would do."""

from __future__ import annotations

import datetime
from pathlib import Path

from nxd_infer.cli.console import console, table
from nxd_infer.recipes.plan import CHIPS, UTILIZATION, Plan, plan_of
from nxd_infer.recipes.recipe import Loaded, load
from nxd_infer.recipes.speed import matmul_peak
from nxd_infer.util.processors import compute_threads
from nxd_infer.util.units import size


def run(file: Path, overrides: list[str], check: bool, chip: str | None) -> None:
    """Read the recipe; print its plan with ``check``, else train."""
    loaded = load(file, overrides)
    say_unused(loaded)
    if check:
        show(plan_of(loaded, *machine(loaded, chip)))


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
    return None, matmul_peak() / max(1, min(loaded.recipe.trainer.devices, threads))


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
