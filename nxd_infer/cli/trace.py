"""``nxd-infer trace`` and ``recompile``: turn a model into an artifact, or one artifact into another.

Most of its options are declared in :mod:`nxd_infer.trace.options`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nxd_infer import trace
from nxd_infer.artifact.manifest import MANIFEST_NAME
from nxd_infer.backends import registry
from nxd_infer.backends.base import quantization_of, quantizations_of
from nxd_infer.checkpoint.source import weight_source
from nxd_infer.cli import stop
from nxd_infer.cli.console import Bars, console, duration, spinner
from nxd_infer.errors import TraceConfigError
from nxd_infer.hugging_face import weights as hf
from nxd_infer.hugging_face.gguf_file import find_gguf, model_directory
from nxd_infer.hugging_face.quantized.formats import format_in
from nxd_infer.hugging_face.tokenizer import TOKENIZER
from nxd_infer.trace import ArtifactWriter
from nxd_infer.trace.options import RecompileOptions, TraceOptions
from nxd_infer.util.dtypes import dtype_of
from nxd_infer.util.machine import processors
from nxd_infer.util.memory import available_memory, total_memory
from nxd_infer.util.options import from_command
from nxd_infer.util.progress_bar import progress_bar
from nxd_infer.util.units import size
from nxd_models.serving import tasks
from nxd_models.serving.task_options import TaskOptions
from nxd_models.serving.task_plan import TaskPlan

DTYPE = "bfloat16"
"""Where the command does not say."""
LINE_EVERY = 10.0
"""Seconds between two lines of one stage when the output is not a terminal."""


class TraceProgress(Bars):
    """Draws the progress of ``parallel_model_trace``; if the output is not a terminal (a log, CI), it prints a line
    when a stage starts and ends, and some in between."""

    def __init__(self, display: Any, line_every: float = LINE_EVERY):
        super().__init__(display)
        self.line_every = line_every
        self.printed: dict[str, tuple[float, int]] = {}

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        stop.check()
        super().__call__(stage, done, total, note)
        now, (when, said) = time.monotonic(), self.printed.get(stage, (-math.inf, 0))
        due = now - when >= self.line_every or (done >= total and done != said)
        if due and not self.display.console.is_terminal:
            self.printed[stage] = now, done
            count = f" {done} of {total}" if total else ""
            self.display.console.print(f"{stage}{count}{f' ({note})' if note else ''}", markup=False)


def _whose_module(metadata: Mapping[str, Any]) -> str:
    """Say whose module is traced for which task, and why."""
    kind, task = metadata["model_type"], metadata["task"]
    if (library := metadata.get("model_impl")) is None:
        return f"{task}: our own family of {kind} is traced"
    why = metadata.get("why_transformers") or f"no family here, or --model-impl {library}"
    return f"{task}: {library}' own {kind} module is traced (docs/transformers.md): {why}"


def run(model_dir: Path, out: Path, *, plan_only: bool = False, **given: Any) -> dict[str, float]:
    """Trace and save; return figures for a report: seconds, graphs, compiled graphs, bytes on disk.

    ``given``: TaskOptions and TraceOptions by name, None for the command's default; ``dtype`` as text.
    """
    if (model_dir / MANIFEST_NAME).is_file() and (model_dir / "graphs").is_dir():
        raise TraceConfigError(
            f"{model_dir} is an artifact, which was traced already: `nxd-infer serve` serves it, and "
            "`nxd-infer recompile` makes one for another backend of it; to trace, give the model's directory"
        )
    ArtifactWriter(out).check_target()  # before minutes of compilation, not after
    if (file := find_gguf(model_dir)) is not None:
        with spinner(f"reading {file.name}, once for all traces of it"):
            model_dir = model_directory(file)
    task = from_command(TaskOptions, given)
    task["dtype"] = dtype_of(task.get("dtype", DTYPE))
    requested = TaskOptions(model_dir, **task)
    arguments = from_command(TraceOptions, given)
    stages = arguments.get("pp_degree", 1)
    if stages > 1 and task.get("slots") is None:
        task["slots"] = stages * max(requested.batch_sizes)  # a batch for each stage to work on
    checkpoint, tag = arguments.pop("checkpoint", None), arguments.pop("checkpoint_tag", None)
    if checkpoint is not None:
        task["weights"] = weight_source(checkpoint, tag)
    plan = tasks.plan(model_dir, **task)
    if not plan_only and checkpoint is None:
        hf.weights(model_dir)  # raises if there are none, before a plan is printed
    arguments = {**plan.trace_arguments(), **arguments}
    backend = registry.get(arguments.get("backend") or registry.default())
    if requested.kv_cache_dtype != "auto" and not backend.native:
        raise TraceConfigError(
            f"kv_cache_dtype = {requested.kv_cache_dtype!r}: graphs of the {backend.name} backend cannot read bytes as "
            "numbers with a scale, those of cpu can: leave it out"
        )
    start = time.monotonic()
    planned = trace.trace_plan(**arguments)
    console.print(planned.table(), markup=False)
    notes = [*_notes(model_dir, plan, planned, requested.prompt_buckets)]
    if checkpoint is None and (stored := format_in(model_dir)) is not None:
        again = [f"they are rounded a second time, to {arguments['quantize']}"] if arguments.get("quantize") else []
        as_dtype = f"the weights are stored as {stored}, and read as {plan.metadata['dtype']}"
        notes.append("; ".join([as_dtype, *stored.notes, *again]))
    for note in notes:
        console.print(f"note: {note}", markup=False)
    if plan_only:
        return {}
    if (out / MANIFEST_NAME).exists():
        console.print(f"note: the artifact in {out} will be replaced once the new one is complete", markup=False)
    with progress_bar(console, drawn=console.is_terminal) as display:
        model = trace.parallel_model_trace(**arguments, artifact_dir=out, progress=TraceProgress(display))
    on_disk = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    seconds = _print_written(out, model.trace_report, f", {size(on_disk)}", start)
    if form := quantization_of(model.manifest, backend):
        weights = model.manifest.weights
        forms = quantizations_of(model.manifest, backend)
        rounded = [spec for spec in weights if spec.encoding in forms]
        more = len([spec for spec in rounded if spec.encoding != form.encoding])
        beside = f" ({more} in int8)" if more else ""
        before = sum(spec.nbytes for spec in weights)
        saved = sum(spec.nbytes - forms[spec.encoding].nbytes(spec.shape) for spec in rounded)
        ranks = model.manifest.tp_degree  # of each stage; the weights are those of all stages
        whole = f", summed over {count} ranks" if (count := model.manifest.world_size) > 1 else ""
        whose = "each rank holds {} of its" if stages == 1 else "the stages hold {} of their"
        console.print(
            f"{form.name}: {whose.format(len(rounded))} {len(weights)} weights so{beside}, "
            f"{size(ranks * (before - saved))} instead of {size(ranks * before)}{whole}; "
            "`nxd-infer verify` measures the accuracy"
        )
    return {**{name: model.trace_report[name] for name in ("graphs", "compiled")}, "seconds": seconds, "bytes": on_disk}


def _notes(model_dir: Path, plan: TaskPlan, planned: trace.TracePlan, prompt_buckets: Sequence[int]) -> Iterator[str]:
    """Yield what a user may not expect of a trace."""
    longest = plan.metadata["max_len"]
    yield _whose_module(plan.metadata)
    if (why := plan.metadata.get("why_whole")) is not None:
        yield f"slow: each token reads the whole text anew, as no cache holds its state: {why} (verify compares them)"
    if unused := plan.metadata.get("generation_without_effect"):
        yield f"the model's generation_config.json has what requests do not get here: {', '.join(unused)}"
    if plan.metadata.get("encodes_prompts"):
        yield f"prompts are read whole, by the encoder, so there is a bucket for the longest, {longest} tokens"
    for length in prompt_buckets:
        if length > longest:
            what = "prompt and answer" if plan.task == "generate" else "text"
            yield f"the bucket of {length} tokens is reduced to the longest {what}, {longest}"
    if TOKENIZER not in plan.files:
        yield (
            f"{model_dir} has no tokenizer.json, nor any other tokenizer's files: the artifact can only be used "
            "through LLM, with token ids"
        )
    total, free, cores = total_memory(), available_memory(), processors()
    if planned.serve_bytes is not None and planned.serve_bytes > total:
        yield f"serving needs about {size(planned.serve_bytes)}; this machine has {size(total)}"
    if planned.trace_peak_bytes is not None and planned.trace_peak_bytes - planned.program_bytes > free:
        yield f"tracing needs about {size(planned.trace_peak_bytes)}; this machine has {size(free)} free"
    if (ranks := planned.tp_degree * planned.pp_degree) > cores:
        yield f"{ranks} ranks share this machine's {cores} cores"


def _print_written(out: Path, report: Mapping[str, Any], more: str, start: float) -> float:
    """Print what was written into ``out`` since ``start``, with ``more`` about it; return the seconds."""
    if words := report["ignored_compiler_args"]:  # for another compiler than the backend's
        console.print(f"note: ignored options of the Neuron compiler: {' '.join(words)}", markup=False)
    seconds = time.monotonic() - start
    graphs = f"{report['graphs']} graphs ({report['compiled']} compiled now)"
    console.print(f"wrote {out}: {graphs}{more}, in {duration(seconds)}", markup=False)
    return seconds


def recompile(artifact: Path, out: Path, given: dict[str, Any]) -> None:
    """Write ``out``; print what was compiled and for which target. ``given``: RecompileOptions by name, or None."""
    start = time.monotonic()
    arguments = from_command(RecompileOptions, given)
    with progress_bar(console, drawn=console.is_terminal) as display:
        report = trace.parallel_model_recompile(artifact, out, **arguments, progress=TraceProgress(display))
    manifest = trace.load_artifact(out, verify=False, runs_here=False).manifest
    made_for = ", ".join([manifest.backend, *(value for value in manifest.target.values() if isinstance(value, str))])
    _print_written(out, report, f" for {made_for}", start)
