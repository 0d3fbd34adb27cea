"""Every text architecture of transformers, built tiny at random: what is served, and what is refused by name.

python -m tests.foreign.architectures [WORD ...]

A word is a task, a model type, or both as TASK/TYPE. Without any, all are tried, and docs/architectures.md is written.
"""

from __future__ import annotations

import re
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nxd_infer.errors import NxdError
from nxd_infer.trace import parallel_model_trace
from nxd_models.serving import tasks
from nxd_models.serving.decoder_step import step_inputs
from tests.foreign.tiny import VOCABULARY, tiny_config, tiny_model, write_model

LISTS = {
    "generate": ("AutoModelForCausalLM", "CAUSAL_LM"),
    "classify": ("AutoModelForSequenceClassification", "SEQUENCE_CLASSIFICATION"),
    "token-classification": ("AutoModelForTokenClassification", "TOKEN_CLASSIFICATION"),
    "question-answering": ("AutoModelForQuestionAnswering", "QUESTION_ANSWERING"),
    "fill-mask": ("AutoModelForMaskedLM", "MASKED_LM"),
    "embed": ("AutoModel", "MASKED_LM"),
}
"""By task: the class that builds a model, and transformers' list of the model types that it is tried with."""
MOST_WEIGHTS = 3_000_000
TOLERANCE = 1e-5
BUCKET, MAX_LEN = 8, 24
LENGTHS = (BUCKET, 5)


@dataclass(frozen=True)
class Result:
    """What came of one architecture: it is "served", "slow" (each token reads the whole text), "refused", "wrong",
    "crashed", "not built" by generic sizes, or "too large" even so."""

    task: str
    kind: str
    state: str
    why: str = ""


def kinds_of(task: str) -> list[str]:
    from transformers.models.auto import modeling_auto

    return list(getattr(modeling_auto, f"MODEL_FOR_{LISTS[task][1]}_MAPPING_NAMES"))


def tried(task: str, kind: str) -> Result:
    """Build, trace and compare one architecture."""
    with tempfile.TemporaryDirectory() as folder:
        return _tried(task, kind, folder)


def _tried(task: str, kind: str, folder: str) -> Result:
    import transformers

    head = LISTS[task][0]
    try:
        config = tiny_config(kind, decodes=task == "generate")
        with torch.device("meta"):
            light = getattr(transformers, head).from_config(config)
        if (count := sum(weight.numel() for weight in light.parameters())) > MOST_WEIGHTS:
            return Result(task, kind, "too large", f"{count} weights")
        model = tiny_model(config, head)
        _expected(model, task, torch.arange(4, 9))
        path = write_model(model, Path(folder))
        reference = getattr(transformers, head).from_pretrained(path, dtype=torch.float32).eval()
    except Exception as error:  # transformers', of a configuration that generic sizes do not fit
        return Result(task, kind, "not built", f"{type(error).__name__}: {error}")
    try:
        difference, whole = _difference(reference, task, path)
    except NxdError as error:
        return Result(task, kind, "refused", str(error).replace(str(path), "DIR"))
    except Exception as error:
        return Result(task, kind, "crashed", f"{type(error).__name__}: {error}")
    if not difference < TOLERANCE:
        return Result(task, kind, "wrong", f"{difference:.2g}")
    return Result(task, kind, "slow" if whole else "served", whole)


@torch.no_grad()
def _difference(reference: Any, task: str, path: Path) -> tuple[float, str]:
    sizes: dict[str, Any] = {"batch_sizes": [1 if task == "generate" else len(LENGTHS)], "prompt_buckets": [BUCKET]}
    plan = tasks.plan(path, task if task == "embed" else None, max_len=MAX_LEN, dtype=torch.float32, **sizes)
    if plan.task != task:
        return float("inf"), ""
    generator = torch.Generator().manual_seed(2)
    with parallel_model_trace(**plan.trace_arguments(), backend="cpu") as traced:
        if task == "generate":
            found = _generated(traced, plan, reference, generator)
        else:
            found = _answered(traced, plan, reference, task, generator)
    return found, plan.metadata.get("why_whole", "")


def _generated(traced: Any, plan: Any, reference: Any, generator: torch.Generator) -> float:
    """A prompt in two pieces, then two tokens one by one."""
    ids = torch.randint(4, VOCABULARY - 2, (1, 15), generator=generator)
    worst = 0.0
    for begin, end in ((0, 8), (8, 13), (13, 14), (14, 15)):
        name, width = ("prefill_s8", 8) if end - begin > 1 else ("decode_b1", 1)
        given = step_inputs(plan.metadata["vocab_size"], 1, width, plan.metadata["slots"])
        given["tokens"][0, : end - begin] = ids[0, begin:end]
        given["start"][0], given["length"][0], given["block_table"][0, 0] = begin, end - begin, 0
        outputs = traced.run_bucket(name, given)
        expected = _expected(reference, "generate", ids[0, :end])[-1].log_softmax(-1)
        at = outputs["top_ids"][0, 0]
        worst = max(worst, _relative(outputs["top_logprobs"][0, 0], expected[at]))
    return worst


def _answered(traced: Any, plan: Any, reference: Any, task: str, generator: torch.Generator) -> float:
    """A full row and a padded one."""
    ids = torch.randint(4, VOCABULARY - 2, (len(LENGTHS), BUCKET), generator=generator)
    mask = torch.stack([torch.arange(BUCKET) < length for length in LENGTHS]).long()
    given = {"input_ids": ids.masked_fill(mask == 0, plan.metadata["pad_token_id"]), "attention_mask": mask}
    given["token_type_ids"] = torch.zeros_like(ids)
    outputs = traced.run_bucket(plan.bucket_names[0], given)
    worst = 0.0
    for row, length in enumerate(LENGTHS):
        expected = _expected(reference, task, ids[row, :length])
        if task == "embed":
            found, expected = outputs["embedding"][row], torch.nn.functional.normalize(expected.mean(0), dim=-1)
        elif task == "fill-mask":
            at = outputs["top_ids"][row, :length]
            found, expected = outputs["top_logprobs"][row, :length], expected.log_softmax(-1).gather(-1, at)
        else:
            found = outputs["logits"][row]
            found = found if task == "classify" else found[:length]
        worst = max(worst, _relative(found, expected))
    return worst


@torch.no_grad()
def _expected(model: Any, task: str, ids: torch.Tensor) -> torch.Tensor:
    """What transformers says of one text without padding."""
    found = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None])
    if task == "embed":
        return found[0][0]
    if task == "question-answering":
        return torch.stack([found.start_logits[0], found.end_logits[0]], -1)
    return found.logits[0]


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


# --- the page --------------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs/architectures.md"
HEAD = """# Which architectures of transformers are served

Written by `python -m tests.foreign.architectures`, which builds the text architectures of transformers {version} tiny
and at random, traces each for one CPU, and compares all outputs with transformers' own (relative 1e-5): none was wrong,
and {served} of {count} are served. Types with [a family or a plan](transformers.md) are split over ranks, others not.

- **served**: with a cache, or in one step.
- **slow**: no cache of ours holds what the model keeps of a text (ALiBi, state spaces, attention sinks), so each token
  reads the whole text anew.
- **refused**: an error says why, such as results that depend on padding or on chance.
"""
STATES = ("served", "slow", "refused")


def page(results: list[Result], version: str) -> str:
    """Return the page of these results."""
    found = [result for result in results if result.state in STATES]
    served = sum(result.state != "refused" for result in found)
    lines = [HEAD.format(version=version, served=served, count=len(found))]
    for task in LISTS:
        for state in STATES:
            kinds = [result.kind for result in found if (result.task, result.state) == (task, state)]
            if kinds:
                lines.append(f"**{task}, {state}** ({len(kinds)}): {', '.join(sorted(kinds))}\n")
    return "\n".join(lines)


def stated(text: str) -> dict[tuple[str, str], str]:
    """Return the state of each (task, model type) on the page."""
    lines = re.findall(r"^\*\*(\S+), (\w+)\*\* \(\d+\): (.*)$", text, re.MULTILINE)
    return {(task, kind): state for task, state, kinds in lines for kind in kinds.split(", ")}


def _late(*_: Any) -> None:
    raise TimeoutError("more than five minutes")


def main(words: list[str]) -> int:
    """Try what the words name, or all; print each result, and write the page if all were tried."""
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    signal.signal(signal.SIGALRM, _late)
    results = []
    for task in LISTS:
        for kind in kinds_of(task):
            if words and not {task, kind, f"{task}/{kind}"} & set(words):
                continue
            signal.alarm(300)
            try:
                result = tried(task, kind)
            except TimeoutError as error:
                result = Result(task, kind, "crashed", str(error))
            signal.alarm(0)
            results.append(result)
            print(task, kind, result.state, " ".join(result.why.split())[:300], sep="\t", flush=True)
    if not words:
        PAGE.write_text(page(results, transformers.__version__))
    return sum(result.state in ("wrong", "crashed") for result in results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
