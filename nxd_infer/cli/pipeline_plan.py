"""``nxd-infer pipeline plan``: the stages of a model and the schedule of a step, as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nxd_infer.cli.console import console, table
from nxd_infer.pipeline.options import PipelineOptions
from nxd_infer.pipeline.partition import describe_partition, imbalance
from nxd_infer.pipeline.pipeline import cuts_of
from nxd_infer.pipeline.schedule import Span, bubble, schedule, timetable
from nxd_infer.recipes.models import CONFIG, build, pipeline_options, raw_config
from nxd_infer.recipes.recipe import load
from nxd_infer.util.units import size
from nxd_models import registry

WIDEST = 150
"""Columns of a picture of a schedule."""
RECIPES = (".yaml", ".yml")
LEAST = 2
"""Pipeline ranks to plan for where none are said."""


def run(source: Path, pp: int | None, given: dict[str, Any]) -> None:
    """Print the partition of the model of ``source`` (see :func:`planned`), its schedule, and the bubble.

    ``given``: options of ``pipeline_config`` that take the place of those of ``source``; None where there is none.
    """
    with torch.device("meta"):
        model, own, stages = planned(source)
    pp = pp or stages
    given = {name: value for name, value in given.items() if value is not None}
    options = PipelineOptions({**own, **given, "auto_partition": "pipeline_cuts" not in {**own, **given}})
    microbatches = options.num_microbatches
    chosen = cuts_of(model, options, pp)
    costs = describe_partition(model, chosen)
    whole = sum(stage.cost for stage in costs)
    rows = [
        (
            str(number),
            str(number % pp),
            stage.first if stage.first == stage.last else f"{stage.first} ... {stage.last}",
            size(stage.bytes),
            f"{stage.cost / whole:.1%}" if whole else "-",
        )
        for number, stage in enumerate(costs)
    ]
    table("", ("stage", "rank", "modules", "weights", "cost"), rows)
    console.print(f"pipeline_cuts: {chosen}", markup=False, soft_wrap=True)
    console.print(f"The most expensive stage works {imbalance(costs):.1%} longer than an equal share.", markup=False)
    # A backward pass multiplies twice as much as a forward pass.
    share = [stage.cost / whole * len(costs) if whole else 1.0 for stage in costs]
    actions = schedule(options.schedule_name, pp, microbatches, options.virtual_pipeline_size)
    passes = timetable(actions, share, [2 * cost for cost in share])
    console.print(f"Expected bubble of {options.schedule_name} with {microbatches} microbatches: {bubble(passes):.1%}")
    console.print(picture(timetable(actions, [1] * len(costs), [2] * len(costs))), markup=False, highlight=False)


def planned(source: Path) -> tuple[nn.Module, dict[str, Any], int]:
    """Return the model of a directory, of a ``config.json`` or of a recipe, its pipeline's options, and its stages."""
    if source.suffix not in RECIPES:
        folder = source.parent if source.name == CONFIG else source
        return registry.build(folder), {"num_microbatches": 8}, LEAST
    loaded = load(source)
    stages = loaded.recipe.distributed_strategy.pipeline_model_parallel_size
    return build(raw_config(loaded)), pipeline_options(loaded.recipe), max(stages, LEAST)


def picture(ranks: Sequence[Sequence[Span]]) -> str:
    """Return a timetable of whole units as a line a rank: the microbatch of each pass, ``.`` for a bubble.

    A forward pass is one column, a backward pass two in brackets, each with the number if they are apart.
    """
    spans = [span for row in ranks for span in row]
    width = len(str(max(span.action.microbatch for span in spans))) + 1 + any(span.action.late for span in spans)
    end = int(max(span.end for span in spans))
    lines = []
    for rank, row in enumerate(ranks):
        cells = [".".rjust(width)] * end
        for span in row:
            text = str(span.action.microbatch)
            if span.end - span.start == 1 and span.action.backward:
                half = f"{text}]" if span.action.late else f"[{text}"
                cells[int(span.start)] = half.rjust(width)
            elif span.action.backward:
                cells[int(span.start) : int(span.end)] = [f"[{text}".rjust(width), "]".ljust(width)]
            else:
                cells[int(span.start)] = text.rjust(width)
        line = f"rank {rank} " + "".join(cells).rstrip()
        lines.append(line if len(line) <= WIDEST else f"{line[: WIDEST - 4]} ...")
    return "\n".join(lines)
