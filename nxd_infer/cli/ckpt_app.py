"""The commands of ``nxd-infer ckpt``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from nxd_infer import cli
from nxd_infer.cli.parameters import words
from nxd_infer.trace.options import TraceOptions
from nxd_infer.util.dtypes import dtype_of
from nxd_infer.util.options import declared

ckpt = typer.Typer(
    help="Inspect training checkpoints and extract weights, offline.",
    epilog="Example:  nxd-infer ckpt inspect ./ckpts",
    no_args_is_help=True,
)
CheckpointDir = Annotated[
    Path,
    typer.Argument(
        help="The folder of save_checkpoint(), one checkpoint in it, or a neuronx_distributed checkpoint.",
        show_default=False,
    ),
]
ModelConfig = Annotated[
    Path | None,
    typer.Option(
        "--config", help="For a checkpoint of neuronx_distributed: the model's directory, with its config.json."
    ),
]
Rules = Annotated[
    Path | None,
    typer.Option(
        help='For a checkpoint of neuronx_distributed: a JSON file of split dimensions, such as {"*.o_proj.weight": 1}.'
    ),
]
Tag = Annotated[str | None, typer.Option(help=declared(TraceOptions)["checkpoint_tag"].help)]
WeightsDir = Annotated[Path, typer.Option("--out", help="Where to write model.safetensors.", show_default=False)]
StoredType = Annotated[
    Literal["float32", "bfloat16"] | None, typer.Option(help="Dtype of floating-point weights. Default: as saved.")
]


def _torch(dtype: str | None) -> Any:
    return dtype_of(dtype) if dtype else None


@ckpt.command(epilog="Example:  nxd-infer ckpt inspect ./ckpts --tag step_100")
def inspect(path: CheckpointDir, tag: Tag = None) -> None:
    """List the complete checkpoints of a folder, or with a tag the logical tensors of one."""
    cli.ckpt.inspect(path, tag)


@ckpt.command(epilog="Example:  nxd-infer ckpt consolidate ./ckpts --out ./weights")
def consolidate(
    path: CheckpointDir,
    out: WeightsDir,
    tag: Tag = None,
    dtype: StoredType = None,
    config: ModelConfig = None,
    rules: Rules = None,
) -> None:
    """Write a checkpoint's whole model, of any degrees, as one safetensors file, one tensor in memory at a time."""
    cli.ckpt.consolidate(path, out, tag=tag, dtype=_torch(dtype), config=config, rules=rules)


@ckpt.command(epilog="Example:  nxd-infer ckpt export-hf ./ckpts --config ./llama --out ./llama-tuned")
def export_hf(
    path: CheckpointDir,
    out: WeightsDir,
    config: Annotated[
        Path, typer.Option(help="A Hugging Face model directory: its configuration and tokenizer.", show_default=False)
    ],
    tag: Tag = None,
    dtype: StoredType = None,
    rules: Rules = None,
) -> None:
    """Write a Hugging Face model directory: the checkpoint's weights with the configuration of another directory."""
    cli.ckpt.export_hf(path, out, config, tag=tag, dtype=_torch(dtype), rules=rules)


@ckpt.command(epilog="Example:  nxd-infer ckpt reshard ./ckpts ./ckpts-tp4 --tp 4 --dp 1")
def reshard(
    path: CheckpointDir,
    out: Annotated[Path, typer.Argument(help="The folder to write the checkpoint into.", show_default=False)],
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor parallel degree of the new checkpoint.")],
    dp: Annotated[int | None, typer.Option("--dp", min=1, help="Data parallel degree. Default: unchanged.")] = None,
    pp: Annotated[int, typer.Option("--pp", min=1, help="Pipeline parallel degree of the new checkpoint.")] = 1,
    cuts: Annotated[
        str | None, typer.Option(help="Last layers of the pipeline stages, by commas. Default: balanced.")
    ] = None,
    tag: Tag = None,
    config: ModelConfig = None,
    rules: Rules = None,
) -> None:
    """Rewrite a checkpoint for other degrees, optimizer included, in one process, one tensor in memory at a time."""
    layers = None if cuts is None else words(cuts)
    cli.ckpt.reshard(path, out, tp=tp, dp=dp, pp=pp, cuts=layers, tag=tag, config=config, rules=rules)


@ckpt.command(epilog="Example:  nxd-infer ckpt diff ./ckpts/step_100 ./ckpts/step_200 --tolerance 1e-5")
def diff(
    first: CheckpointDir,
    second: CheckpointDir,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest max|a-b| / max(|a|,|b|) of a tensor to accept.")
    ] = 0.0,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Ignore the optimizers' moments.")] = False,
    config: ModelConfig = None,
    rules: Rules = None,
    tag: Annotated[
        str | None, typer.Option(help="Which checkpoint of the first. Default: the newest complete one.")
    ] = None,
    other_tag: Annotated[str | None, typer.Option("--other-tag", help="Which one of the second.")] = None,
) -> None:
    """Compare names, shapes, dtypes and values of two checkpoints of any degrees; exits 1 above the tolerance."""
    options = {"weights_only": weights_only, "tags": (tag, other_tag), "config": config, "rules": rules}
    raise typer.Exit(cli.ckpt.diff(first, second, tolerance, **options))
