"""The commands of ``nxd-infer pipeline``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nxd_infer import cli
from nxd_infer.cli.parameters import words

pipeline = typer.Typer(
    help="Look at pipelines before they train.",
    epilog="Example:  nxd-infer pipeline plan ./llama --pp 2",
    no_args_is_help=True,
)


@pipeline.command(epilog="Example:  nxd-infer pipeline plan ./llama --pp 2 --microbatches 16")
def plan(
    model: Annotated[
        Path,
        typer.Argument(
            help="A Hugging Face directory of a supported family, its config.json, or a recipe (YAML).",
            show_default=False,
        ),
    ],
    pp: Annotated[
        int | None, typer.Option(help="Pipeline ranks. Default: the recipe's, or 2.", min=2, max=1024)
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(help="Microbatches of a step. Default: the recipe's, or 8.", min=1, max=4096)
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(help="Stages per rank; above 1 the schedule is interleaved. Default: 1.", min=1, max=1024),
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="1f1b, gpipe, interleaved or zero-bubble. Default: by --chunks.")
    ] = None,
    cuts: Annotated[str | None, typer.Option(help="Last layers of the stages, by commas. Default: balanced.")] = None,
) -> None:
    """Print the stages of a model, what each holds and costs, the schedule, and the bubble to expect. No weights are
    read."""
    given = {
        "num_microbatches": microbatches,
        "virtual_pipeline_size": chunks,
        "schedule": schedule,
        "pipeline_cuts": None if cuts is None else words(cuts),
    }
    cli.pipeline_plan.run(model, pp, given)
