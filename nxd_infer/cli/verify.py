"""``nxd-infer verify``: print how an artifact compares with the unsharded eager model."""

from __future__ import annotations

from pathlib import Path

from nxd_infer.cli.console import console, table
from nxd_infer.cli.demo.corpus import split
from nxd_infer.cli.trace import TraceProgress
from nxd_infer.util.progress_bar import progress_bar
from nxd_infer.verify.accuracy import Accuracy
from nxd_infer.verify.artifact import verify_artifact


def run(
    artifact: Path,
    model_dir: Path,
    tolerance: float | None,
    seed: int,
    checkpoint: str | None = None,
    checkpoint_tag: str | None = None,
    allow_kernel: bool | None = None,
) -> int:
    """Print one row per bucket; return 0 if all are within the tolerance. ``checkpoint``, if given, has the weights."""
    with progress_bar(console, drawn=console.is_terminal) as display:
        result = verify_artifact(
            artifact,
            model_dir,
            tolerance=tolerance,
            seed=seed,
            checkpoint=checkpoint,
            tag=checkpoint_tag,
            allow_kernel=allow_kernel is not False,
            text=split()[1][0],
            progress=TraceProgress(display, line_every=0.0),
        )
    manifest, form = result.manifest, result.rounded
    whose = str(model_dir) if checkpoint is None else f"{checkpoint} ({checkpoint_tag or 'the newest'})"
    stages = f", pp {manifest.pp_degree}" if manifest.pp_degree > 1 else ""
    table(
        f"{artifact} (tp {manifest.tp_degree}{stages}, {manifest.backend}) against {whose}, unsharded and eager"
        + ("" if manifest.metadata.get("model_impl") is None else ", in transformers' own code")
        + (f", weights rounded to {form.name}" if form else "")
        + (f"; its keys and values are {cache}" if (cache := manifest.metadata.get("kv_cache_dtype")) else ""),
        ("bucket", "max|a-b| / max|b|", "sampled", "verdict"),
        [
            (row.bucket, f"{row.difference:.1e}", row.agreement, f"{row.wrong} differs" if row.wrong else "equal")
            for row in result.rows
        ],
    )
    if form and result.accuracy:
        _print_accuracy(form.name, result.accuracy)
    failed, count = result.failed, len(result.rows)
    if failed:
        first = next(row for row in result.rows if row.wrong)
        console.print(f"the first output that differs: {first.wrong} of {first.bucket}")
        console.print(
            f"{len(failed)} of {count} buckets are past the tolerance of {result.tolerance:g}: {', '.join(failed)}"
        )
        console.print(
            f"This compares with the weights of {whose}: an artifact traced from other weights differs. For a "
            "training checkpoint, pass --checkpoint and --tag.",
            markup=False,
        )
        if (library := manifest.metadata.get("model_impl")) is not None:
            console.print(
                f"If the weights are the same, the plan of {manifest.metadata['model_type']} is wrong, or how "
                f"{library}' module is traced: docs/transformers.md says how a plan is written.",
                markup=False,
            )
        return 1
    console.print(f"all {count} buckets are within the tolerance of {result.tolerance:g}")
    return 0


def _print_accuracy(name: str, lost: Accuracy) -> None:
    if not lost.tokens:
        console.print(
            f"{name} weights against the model's own: outputs differ by {lost.largest:.3g} at most, {lost.mean:.2g} on "
            f"average (the largest is {lost.scale:.3g})"
        )
        return
    what = "random tokens" if lost.perplexity is None else "tokens of Python's language reference"
    console.print(f"{name} weights against the model's own, over {lost.tokens} {what}:", markup=False)
    console.print(f"  logits       differ by {lost.largest:.3g} at most, {lost.mean:.2g} on average")
    console.print(f"               (the largest is {lost.scale:.3g})")
    share = f"{lost.same / lost.tokens:.1%}"
    console.print(f"  next tokens  {lost.same} of {lost.tokens} are the same, taking the likeliest ({share})")
    if lost.perplexity is not None:
        before, after = lost.perplexity
        console.print(f"  perplexity   {after:.4g}, the model's own {before:.4g} ({after / before - 1:+.2%})")
