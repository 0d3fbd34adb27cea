"""``nxd-infer train --check``: what a recipe would do, as a table."""

from __future__ import annotations

import datetime

from nxd_infer.cli.console import console, table
from nxd_infer.recipes.checks import missing_files, slow_products
from nxd_infer.recipes.job import notes_of_weights
from nxd_infer.recipes.models import dtypes
from nxd_infer.recipes.plan import CHIPS, UTILIZATION, plan_of
from nxd_infer.recipes.prepare import notes_of_data
from nxd_infer.recipes.recipe import Loaded
from nxd_infer.recipes.speed import matmul_peak
from nxd_infer.util.machine import compute_threads
from nxd_infer.util.units import size


def show(loaded: Loaded, chip: str | None) -> None:
    """Print parameters, memory per rank, tokens per step and time of a recipe, and what keeps it from running here."""
    chip, peak = _machine(loaded, chip)
    plan = plan_of(loaded, chip, peak)
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
    speed = f"{plan.peak / 1e12:,.3g} TFLOP/s"
    console.print(f"Times assume {UTILIZATION:.0%} of {speed} per rank, {plan.device}.", markup=False)
    for obstacle in plan.obstacles:
        console.print(f"cannot be trained here: {obstacle}", markup=False, soft_wrap=True)
    missing = [str(one) for one in missing_files(loaded)]  # a plan may be for another machine
    notes = missing or [*notes_of_data(loaded), *notes_of_weights(loaded)]
    for note in [*notes, *(slow_products(loaded) if chip is None else [])]:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def _machine(loaded: Loaded, chip: str | None) -> tuple[str | None, float]:
    """Return the device that a plan's time is for: a chip where the recipe has more ranks than this machine cores."""
    threads = compute_threads()
    if chip is None and loaded.recipe.trainer.devices > threads:
        chip = "trn2" if loaded.recipe.trainer.lnc else "trn1"
    if chip in CHIPS:
        return chip, 0.0
    return None, matmul_peak(dtypes(loaded.recipe).products) / max(1, min(loaded.recipe.trainer.devices, threads))
