"""Compare a traced artifact with the unsharded eager model, bucket by bucket.

That of a model type without a family of ours is transformers' own, which computes each text without a cache.
An artifact with rounded weights is compared with a model of these, which it should equal; the loss of
accuracy is measured separately.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from nxd_infer import trace
from nxd_infer.artifact.manifest import Manifest
from nxd_infer.backends.base import Quantization
from nxd_infer.checkpoint.source import weight_source
from nxd_infer.errors import ArtifactError, InputRangeError
from nxd_infer.hugging_face import weights as hf
from nxd_infer.util.dtypes import dtype_of
from nxd_infer.util.options import Option
from nxd_infer.util.progress import Progress, silent
from nxd_infer.verify import accuracy
from nxd_models import registry
from nxd_models.serving import tasks
from nxd_server.engine.text_encoder import probabilities, scores_of

Tensors = dict[str, Tensor]
Case = tuple[str, list[tuple[str, Tensors]]]
"""A bucket's name, and its steps: a bucket's name and inputs each."""

TOLERANCES = {"float32": 1e-4, "float64": 1e-8, "bfloat16": 3e-2, "float16": 1e-2}
"""Of models of at most :data:`FEW_LAYERS` layers."""
ROUNDED_INPUTS = 3e-2
"""Of models whose layers round their inputs, at least: those that differ in the last bit may be rounded differently."""
FEW_LAYERS = 8


def default_tolerance(dtype: str, layers: int) -> float:
    """Return the tolerance of a model: in half precision each layer rounds, and independent errors add up by their
    squares. PyTorch's own bfloat16 is 0.05 from float32 after 30 layers."""
    deep = math.sqrt(max(1.0, layers / FEW_LAYERS)) if dtype in ("bfloat16", "float16") else 1.0
    return TOLERANCES[dtype] * deep


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
    """Return max|a - b| / max|b|; infinite if they differ where one of them is not finite."""
    a, b = ours.double(), reference.double()
    finite = torch.isfinite(a) & torch.isfinite(b)
    if not bool((finite | (a == b) | (a.isnan() & b.isnan())).all()):
        return float("inf")
    a, b = a[finite], b[finite]
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) if b.numel() else 0.0


@dataclass(frozen=True)
class Verification:
    """The result of :func:`verify_artifact`."""

    manifest: Manifest
    rows: list[Row]
    """One per bucket."""
    tolerance: float
    rounded: Quantization | None
    """The form of the artifact's rounded weights, if it has any."""
    accuracy: accuracy.Accuracy | None
    """What is lost by rounding them; None if none are."""

    @property
    def failed(self) -> list[str]:
        """The buckets beyond the tolerance."""
        return [row.bucket for row in self.rows if row.wrong]


@torch.no_grad()
def verify_artifact(
    artifact: str | os.PathLike[str],
    model_dir: str | os.PathLike[str],
    *,
    tolerance: float | None = None,
    seed: int = 0,
    checkpoint: str | None = None,
    tag: str | None = None,
    allow_kernel: bool = True,
    text: str = "",
    progress: Progress = silent,
) -> Verification:
    """Compare an artifact that ``nxd-infer trace`` wrote with the model that it was traced from, on random inputs.

    Args:
        artifact: is loaded, and each of its buckets run.
        model_dir: the Hugging Face directory of the model, whose weights it is compared with.
        tolerance: largest ``max|a-b| / max|b|`` of the outputs to accept. Default: :func:`default_tolerance`.
        seed: of the inputs.
        checkpoint, tag: take the weights of this training checkpoint instead, as for ``trace``.
        allow_kernel: False rejects an artifact that chooses its buckets with its own code.
        text: over which logits are compared if a generating model's weights are rounded. Default: random tokens.
        progress: called as ``progress(stage, done, total, note)``; "compare buckets" has a step for each bucket.

    Raises InputRangeError for a negative or infinite tolerance, ArtifactError for an artifact without a model directory
    to rebuild it from, WeightMismatchError for another model's directory.
    """
    if tolerance is not None:
        Option(MISSING, "", float, minimum=0).checked("tolerance", tolerance, InputRangeError)
    model_dir = Path(model_dir)
    rows: list[Row] = []
    # A wrong path is refused before anything is loaded.
    weights = hf.weights(model_dir) if checkpoint is None else weight_source(checkpoint, tag)
    progress("load the artifact and the model", 0, 1)
    with trace.parallel_model_load(str(artifact), allow_kernel=allow_kernel) as model:
        manifest = model.manifest
        task = task_of(manifest)
        directory = registry.load_config(model_dir, manifest.metadata.get("model_impl"), task)
        if checkpoint is None:
            weights = registry.weights(directory, task)
        eager, rounds = reference_of(manifest, model_dir, weights)
        generates, classifies = (task == one for one in ("generate", "classify"))
        cases = generation_cases if generates else one_shot_cases
        config = directory.config
        # The reference has a plain cache, so that differences show what eight bits lose.
        dtype = "bfloat16" if "kv_cache_dtype" in manifest.metadata else manifest.metadata["dtype"]
        limit = default_tolerance(dtype, config.num_layers) if tolerance is None else tolerance
        form = accuracy.quantization(manifest)
        if tolerance is None and form and form.inputs:
            limit = max(limit, ROUNDED_INPUTS)
        progress("load the artifact and the model", 1, 1)
        seen: list[tuple[Tensors, Tensors]] = []
        for bucket, steps in cases(manifest, torch.Generator().manual_seed(seed)):
            progress("compare buckets", len(rows), len(manifest.buckets), bucket)
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
        progress("compare buckets", len(rows), len(manifest.buckets))
    lost: accuracy.Accuracy | None = None
    if form:
        progress("compare with the weights before rounding", 0, 1)
    if form and generates:
        del eager
        lost = accuracy.of_text(model.artifact, model_dir, weights, text, seed)
    elif form:
        for handle in rounds:
            handle.remove()
        lost = accuracy.of_outputs(hf.load(eager, weights), seen)
    if form:
        progress("compare with the weights before rounding", 1, 1)
    return Verification(manifest, rows, limit, form, lost)


def compare(bucket: str, ours: Tensors, reference: Tensors, tolerance: float) -> Row:
    """Compare outputs: floating-point within the tolerance; a sampled token may differ only between near ties."""
    if "token" not in reference:
        floating = [name for name, tensor in reference.items() if tensor.is_floating_point()]
        differences = {name: relative(ours[name], reference[name]) for name in floating}
        wrong = next((name for name, difference in differences.items() if not difference <= tolerance), "")
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


def task_of(manifest: Manifest) -> str:
    """Return the task of an artifact that `nxd-infer trace` wrote. Raises ArtifactError for any other."""
    if (task := manifest.metadata.get("task")) not in registry.TASKS:
        raise ArtifactError(
            "verify compares artifacts that `nxd-infer trace` wrote; this one has "
            f"task = {task!r}, so there is no model directory to rebuild it from"
        )
    if manifest.metadata.get("head"):
        raise ArtifactError("verify compares models with their directories, and this artifact is a head of another one")
    return task


def reference_of(manifest: Any, model_dir: Path, weights: Any) -> tuple[torch.nn.Module, list[RemovableHandle]]:
    """Return the unsharded eager module which the artifact should equal: states empty, ``weights`` quantized like the
    artifact's, its layers' inputs too, until the handles are removed."""
    meta = manifest.metadata
    task_of(manifest)
    options: dict[str, Any] = {}
    if meta["task"] == "generate":
        options = {"slots": meta["slots"], "bias_slots": meta["bias_slots"], "speculate": meta.get("speculate", 0)}
        options |= {"hidden_states": meta.get("hidden_states", {}).get("kind")}
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
    module = plan.func(**plan.func_kwargs, reference=True)
    module, handles = accuracy.RoundedSource(manifest, hf.named_weights(module, weights)).load(module)
    return module.eval(), handles


# --- inputs -------------------------------------------------------------------------------------------


def generation_cases(manifest: Any, generator: torch.Generator) -> Iterator[Case]:
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


def one_shot_cases(manifest: Any, generator: torch.Generator) -> Iterator[Case]:
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


def full_inputs(bucket: Any, inputs: Tensors) -> Tensors:
    """Return ``inputs`` plus the runtime's defaults for missing ones."""
    defaults = {
        spec.name: torch.full(tuple(spec.shape), spec.default or 0, dtype=spec.torch_dtype) for spec in bucket.inputs
    }
    return {**defaults, **inputs}
