"""``nxd-infer verify``: compare the traced artifact with the unsharded eager model, bucket by bucket.

That of a model type without a family of ours is transformers' own, which computes each text without a cache.
An artifact with rounded weights is compared with a model of these, which it should equal; the loss of
accuracy is measured separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxd_infer import trace
from nxd_infer.artifact.manifest import dtype_of
from nxd_infer.checkpoint.source import weight_source
from nxd_infer.cli import accuracy
from nxd_infer.cli.console import bar, console, table
from nxd_infer.errors import ArtifactError
from nxd_models import registry
from nxd_models.hf import weights as hf
from nxd_models.serving import tasks
from nxd_server.engine.classifier_scores import probabilities, scores_of

TOLERANCES = {"float32": 1e-4, "float64": 1e-8, "bfloat16": 3e-2, "float16": 1e-2}
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    """One bucket's verdict."""

    bucket: str
    difference: float
    """max|a - b| / max|b| over the floating-point outputs that do not depend on how ties are broken."""
    agreement: str
    """How many of the integer outputs are equal; "" if there are none."""
    wrong: str = ""
    """The first output that differs; "" if none does."""


def relative(ours: Tensor, reference: Tensor) -> float:
    """Return max|a - b| / max|b|; infinite if only one of them is finite somewhere."""
    a, b = ours.double(), reference.double()
    if not torch.equal(torch.isfinite(a), torch.isfinite(b)):
        return float("inf")
    finite = torch.isfinite(b)
    a, b = a[finite], b[finite]
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) if b.numel() else 0.0


def generation_cases(manifest: Any, generator: torch.Generator) -> Iterator[tuple[str, list[tuple[str, Tensors]]]]:
    """Yield ``(bucket, steps)``: the last step is compared; the steps before it fill the slots that it reads."""
    meta = manifest.metadata
    vocabulary = meta["vocab_size"]

    def step(bucket: Any, slots: list[int], starts: list[int], lengths: list[int]) -> tuple[str, Tensors]:
        shape = next(spec.shape for spec in bucket.inputs if spec.name == "tokens")
        return bucket.name, {
            "tokens": torch.randint(vocabulary, tuple(shape), generator=generator),
            "start": torch.tensor(starts),
            "length": torch.tensor(lengths),
            "block_table": torch.tensor(slots)[:, None],
        }

    lengths = {b.name: next(s.shape for s in b.inputs if s.name == "tokens") for b in manifest.buckets}
    prefills = sorted((b for b in manifest.buckets if lengths[b.name][1] > 1), key=lambda b: lengths[b.name][1])
    for bucket in prefills:  # includes the buckets that verify drafts
        rows, length = lengths[bucket.name]
        yield bucket.name, [step(bucket, list(range(rows)), [0] * rows, [length] * rows)]
    prefills = [bucket for bucket in prefills if lengths[bucket.name][0] == 1]
    single = next((b for b in manifest.buckets if lengths[b.name] == [1, 1]), None)
    for bucket in (b for b in manifest.buckets if lengths[b.name][1] == 1):
        rows = lengths[bucket.name][0]
        slots = [row % meta["slots"] for row in range(rows)]  # additional rows feed a slot's next tokens
        fill = prefills[0] if prefills else single
        steps = []
        begin = 0
        if fill is not None:
            begin = lengths[fill.name][1]
            steps = [step(fill, [slot], [0], [begin]) for slot in sorted(set(slots))]
        if begin < meta["max_len"]:
            starts = [begin + row // meta["slots"] for row in range(rows)]
            live = [int(start < meta["max_len"]) for start in starts]
            steps.append(step(bucket, slots, [start * fits for start, fits in zip(starts, live, strict=True)], live))
        yield bucket.name, steps


def one_shot_cases(manifest: Any, generator: torch.Generator) -> Iterator[tuple[str, list[tuple[str, Tensors]]]]:
    """Yield random ids under masks of random lengths, one step per bucket."""
    vocabulary = manifest.metadata["vocab_size"]
    for bucket in manifest.buckets:
        inputs: Tensors = {}
        for spec in bucket.inputs:
            rows, columns = spec.shape
            if spec.name == "attention_mask":
                live = torch.randint(1, columns + 1, (rows, 1), generator=generator)
                inputs[spec.name] = (torch.arange(columns)[None] < live).to(spec.torch_dtype)
            elif spec.name == "input_ids":
                inputs[spec.name] = torch.randint(vocabulary, (rows, columns), generator=generator)
            else:
                inputs[spec.name] = torch.zeros(rows, columns, dtype=spec.torch_dtype)
        yield bucket.name, [(bucket.name, inputs)]


def compare(bucket: str, ours: Tensors, reference: Tensors, tolerance: float) -> Row:
    """Compare outputs: floating-point within the tolerance; a sampled token may differ only between near ties."""
    if "top_logprobs" not in reference:
        differences = {name: relative(ours[name], reference[name]) for name in reference}
        wrong = next((name for name, difference in differences.items() if difference > tolerance), "")
        return Row(bucket, max(differences.values()), "", wrong)
    top, token = reference["top_logprobs"].flatten(0, 1), reference["token"].flatten()
    difference = relative(ours["top_logprobs"].flatten(0, 1), top)
    same = ours["token"].flatten() == token
    near_tie = (top[:, 0] - top[:, 1]) <= tolerance * top.abs().max()
    right = {"top_logprobs": difference <= tolerance, "token": bool((same | near_tie).all())}
    wrong = next((name for name, fits in right.items() if not fits), "")
    return Row(bucket, difference, f"{int(same.sum())} of {same.numel()} tokens", wrong)


def answered(outputs: Tensors, scores: str) -> Tensors:
    """Return a classifier's outputs and the scores that a client would get."""
    probs = probabilities(outputs["logits"], scores)
    return {**outputs, "scores": outputs["logits"] if probs is None else probs}


def reference_of(manifest: Any, model_dir: Path, weights: Any) -> Callable[[], torch.nn.Module]:
    """Return a function that builds the unsharded eager module which the artifact should equal: states empty,
    ``weights`` quantized like the artifact's.
    """
    meta = manifest.metadata
    if meta.get("task") not in registry.TASKS:
        raise ArtifactError(
            "verify compares artifacts that `nxd-infer trace` wrote; this one has "
            f"task = {meta.get('task')!r}, so there is no model directory to rebuild it from"
        )
    options: dict[str, Any] = {}
    if meta["task"] == "generate":
        options = {"slots": meta["slots"], "bias_slots": meta["bias_slots"], "speculate": meta.get("speculate", 0)}
        options |= {f"lora_{name}": value for name, value in meta.get("lora", {}).items()}
    if meta["task"] == "embed":
        options = {"pooling": meta["pooling"], "normalize": meta["normalize"]}
    plan = tasks.plan(
        model_dir,
        task=meta["task"],
        model_impl=meta.get("model_impl"),
        batch_sizes=meta["batch_sizes"],
        prompt_buckets=meta.get("prompt_buckets") or meta["length_buckets"],
        max_len=meta["max_len"],
        dtype=dtype_of(meta["dtype"]),
        **options,
    )

    def make() -> torch.nn.Module:
        module = plan.func(**plan.func_kwargs, reference=True)
        source = hf.named_weights(module, weights)
        return hf.load(module, accuracy.RoundedSource(manifest, source)).eval()

    return make


@torch.no_grad()
def run(
    artifact: Path,
    model_dir: Path,
    tolerance: float | None,
    seed: int,
    checkpoint: str | None = None,
    tag: str | None = None,
    allow_kernel: bool = True,
) -> int:
    """Print one row per bucket; return 0 if all are within the tolerance. ``checkpoint``, if given, has the weights."""
    rows: list[Row] = []
    with trace.parallel_model_load(str(artifact), allow_kernel=allow_kernel) as model:
        manifest = model.manifest
        weights = hf.weights(model_dir) if checkpoint is None else weight_source(checkpoint, tag)
        make = reference_of(manifest, model_dir, weights)
        limit = TOLERANCES[manifest.metadata["dtype"]] if tolerance is None else tolerance
        cases = generation_cases if manifest.metadata["task"] == "generate" else one_shot_cases
        eager = make()
        classifies = manifest.metadata["task"] == "classify"
        config = registry.load_config(model_dir, manifest.metadata.get("model_impl")).config
        seen: list[tuple[Tensors, Tensors]] = []
        with bar() as display:
            task = display.add_task("comparing", total=len(manifest.buckets), note="")
            for bucket, steps in cases(manifest, torch.Generator().manual_seed(seed)):
                display.update(task, note=bucket)
                ours: Tensors = {}
                reference: Any = {}
                for name, inputs in steps:
                    ours = model.run_bucket(name, inputs)
                    filled = full_inputs(manifest.bucket(name), inputs)
                    reference = eager(**filled)
                    seen.append((filled, ours))
                    if "length" in inputs:  # the outputs of idle rows mean nothing
                        live = inputs["length"] > 0
                        ours, reference = ({k: v[live] for k, v in out.items()} for out in (ours, reference))
                if classifies and isinstance(config, registry.EncoderConfig):
                    ours = answered(ours, scores_of(manifest.metadata))
                    reference = answered(reference, config.scores)
                rows.append(compare(bucket, ours, reference, limit))
                display.advance(task)
    whose = str(model_dir) if checkpoint is None else f"{checkpoint} ({tag or 'the newest'})"
    form = accuracy.quantization(manifest)
    stages = f", pp {manifest.pp_degree}" if manifest.pp_degree > 1 else ""
    table(
        f"{artifact} (tp {manifest.tp_degree}{stages}, {manifest.backend}) against {whose}, unsharded and eager"
        + ("" if manifest.metadata.get("model_impl") is None else ", in transformers' own code")
        + (f", weights rounded to {form.name}" if form else ""),
        ("bucket", "max|a-b| / max|b|", "sampled", "verdict"),
        [
            (row.bucket, f"{row.difference:.1e}", row.agreement, f"{row.wrong} differs" if row.wrong else "equal")
            for row in rows
        ],
    )
    if form and cases is generation_cases:
        del eager
        accuracy.report_text(model.artifact, model_dir, weights, seed, form)
    elif form:
        accuracy.report_outputs(hf.load(eager, weights), seen, form)
    failed = [row.bucket for row in rows if row.wrong]
    if failed:
        first = next(row for row in rows if row.wrong)
        console.print(f"the first output that differs: {first.wrong} of {first.bucket}")
        console.print(f"{len(failed)} of {len(rows)} buckets are past the tolerance of {limit:g}: {', '.join(failed)}")
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
    console.print(f"all {len(rows)} buckets are within the tolerance of {limit:g}")
    return 0


def full_inputs(bucket: Any, given: Tensors) -> Tensors:
    """Return ``given`` plus the runtime's defaults for missing inputs."""
    return {
        spec.name: given[spec.name]
        if spec.name in given
        else torch.full(tuple(spec.shape), spec.default or 0, dtype=spec.torch_dtype)
        for spec in bucket.inputs
    }
