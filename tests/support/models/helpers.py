"""What the model tests share: Hugging Face on the same weights, prompts, comparisons."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nxd_models.registry import GROUP

GAP = 1e-5
"""Where the reference's two best logits are closer than this, either token is right."""
FOREIGN, FOREIGN_PLAN = (Path(__file__).with_name(name) for name in ("foreign", "foreign_plan"))
"""Distributions as pip leaves them: a module with a family, or with a plan, and a dist-info folder with the entry
point."""
ODD = {
    "hidden_size": 36,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "intermediate_size": 50,
    "vocab_size": 287,
}
"""Sizes of a Llama whose heads, inner size and vocabulary do not divide over any degree."""


@contextlib.contextmanager
def installed_package(folder: Path) -> Iterator[None]:
    """The package in ``folder`` is there inside the block, as if installed, for this process and those it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        yield


def install(root: Path, package: str, points: dict[str, str], source: str = "") -> None:
    """What pip leaves: a module, and a dist-info folder with entry points."""
    info = root / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{model_type} = {value}" for model_type, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines]))
    (root / f"{package}.py").write_text(source)


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """max|a - b| / max|b|."""
    return ((found.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def prompts_of(lengths, vocabulary: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, vocabulary, (n,), generator=generator).tolist() for n in lengths]


@functools.lru_cache(maxsize=4)
def reference(path: Path, kind: str):
    """The Hugging Face model of a directory: kind is CausalLM, Model or SequenceClassification."""
    import transformers

    transformers.logging.set_verbosity_error()
    name = "AutoModel" if kind == "Model" else f"AutoModelFor{kind}"
    eager = "eager"  # which no release computes without something, as transformers 4's others do without soft caps
    return getattr(transformers, name).from_pretrained(path, dtype=torch.float32, attn_implementation=eager).eval()


@torch.no_grad()
def greedy_reference(path: Path, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Tokens of ``generate`` and, for each, the gap between the two best logits. The end token is banned."""
    output = reference(path, "CausalLM").generate(
        torch.tensor([prompt]),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    gaps = [float(best[0, 0] - best[0, 1]) for best in (logits.topk(2).values for logits in output.logits)]
    return output.sequences[0, len(prompt) :].tolist(), gaps


def assert_greedy(found: list[int], expected: list[int], gaps: list[float]) -> None:
    """Equal up to the first position where the reference itself is undecided."""
    for at, (a, b, gap) in enumerate(zip(found, expected, gaps, strict=True)):
        if gap < GAP:
            return
        assert a == b, f"token {at}: {a} instead of {b} (gap {gap:.3g}): {found} / {expected}"


def without_mixed(plan):
    """A decoder's plan without the graph that takes prompts beside streams: ``traced_run`` never chooses it."""
    kept = [place for place, name in enumerate(plan.bucket_names) if not name.startswith("mixed")]
    parts = {name: [getattr(plan, name)[place] for place in kept] for name in ("bucket_names", "example_inputs")}
    return dataclasses.replace(plan, **parts)


def traced_run(model, step):
    """``run`` for ``generate_eager`` over a traced model: each step in the smallest bucket that holds it.

    Rows and positions that are left over are idle: the scratch slot, no tokens.
    """
    from nxd_models.serving.decoder_step import step_inputs

    shapes = {bucket.name: tuple(bucket.inputs[0].shape) for bucket in model.manifest.buckets}

    def run(inputs):
        rows, length = inputs["tokens"].shape
        fits = [name for name, (b, s) in shapes.items() if b >= rows and s >= length]
        name = min(fits, key=lambda n: shapes[n][0] * shapes[n][1])
        sizes = (step.config.vocab_size, *shapes[name], step.slots, step.bias_slots)
        full = step_inputs(*sizes, adapter=step.adapter_slots is not None)
        for key, value in inputs.items():
            full[key][tuple(slice(size) for size in value.shape)] = value
        outputs = model.run_bucket(name, full)
        return {key: value[:rows] for key, value in outputs.items()}

    return run
