"""Measure what rounding weights costs: perplexity of a real small model over its own in bfloat16, and llama.cpp's
forms of the same file over its float16.

The model is the demo's, SmolLM2-135M-Instruct, whose file has four bits (Q4_1) already: both sides read its values, and
round them again. The text is that of this project's pages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.artifacts import nxd_infer, sources_digest
from bench.model import stamped
from bench.options import THREADS, Options, home
from bench.peers.known import Known, field_with
from bench.stats import Verdict, summary
from nxd_infer.cli.demo import smollm2
from nxd_server import LLM, SamplingParams

CHUNK = 512
"""Tokens of a chunk, of which each but the first is predicted from those before it."""
CHUNKS = 12
OURS: dict[str, tuple[str, ...]] = {
    form: () if form == "bfloat16" else ("--quantize", form)
    for form in ("bfloat16", "int8", "int4", "int4-asym", "int4-64", "int4-64-asym", "int4-128-asym")
}
THEIRS = ("F16", "Q8_0", "Q4_0", "Q4_1", "Q4_K_M")
LIMIT = "Q4_K_M"
PAGES = Path(__file__).parents[1] / "docs"


def run(options: Options) -> None:
    model = smollm2.installed()
    if model is None:
        raise SystemExit(f"{smollm2.PACKAGE} is not installed, `make install` does it")
    count, folder = 2 if options.quick else CHUNKS, home() / "perplexity"
    folder.mkdir(exist_ok=True)
    chunks: list[list[int]] = []
    costs: dict[str, float] = {}
    for form, further in OURS.items():
        with LLM(_traced(folder, model, form, further), threads_per_rank=THREADS) as llm:
            chunks = chunks or _chunks(llm, count)
            costs[form] = _perplexity([_ours(llm, chunk) for chunk in chunks])
    wanted: dict[str, tuple[Known, Mapping[str, Any]]] = {
        form: (
            Known("llama", "llama_cpp"),
            {"model": str(model), "threads": THREADS, "form": form, "folder": str(folder)},
        )
        for form in THEIRS
    }
    with field_with(wanted if "llama_cpp" in options.peers else {}) as field:
        for name, peer in field.peers.items():
            costs[name] = _perplexity([peer.ask("score", 600.0, prompt=chunk) for chunk in chunks])
        skipped = field.skipped
    over = {name: cost / costs["bfloat16" if name in OURS else "F16"] - 1 for name, cost in costs.items()}
    rows = [(name, f"{cost:.3f}", f"{over[name]:+.2%}") for name, cost in costs.items()]
    verdicts = []
    if LIMIT in over:
        best = min((form for form in OURS if form.startswith("int4")), key=over.__getitem__)
        limits = (1 + over[LIMIT], 1.0)
        verdicts.append(Verdict(f"perplexity of {best} over bfloat16", summary([1 + over[best]]), *limits, "lower"))
    report.write(
        *("perplexity", f"Perplexity, {count} chunks of {CHUNK} tokens", ("form", "perplexity", "over plain"), rows),
        costs,
        verdicts=verdicts,
        skipped=skipped,
        settings=options.settings(),
    )


def _traced(folder: Path, model: Path, form: str, further: Sequence[str]) -> Path:
    arguments: list[Any] = ["trace", model, "--batch-sizes", 1, "--prompt-buckets", CHUNK, "--max-len", 2 * CHUNK]
    arguments += ["--dtype", "bfloat16", *further]
    key = f"{sources_digest()} {model.name} {arguments}"
    return stamped(folder / form, key, lambda out: nxd_infer(*arguments, "--out", out))


def _chunks(llm: LLM, count: int) -> list[list[int]]:
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md")))
    assert llm.tokenizer is not None
    tokens = llm.tokenizer.encode(text)
    return [tokens[at : at + CHUNK] for at in range(0, count * CHUNK, CHUNK)]


def _ours(llm: LLM, chunk: list[int]) -> list[float]:
    (answer,) = llm.generate([chunk], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    return [one.logprob for one in answer.prompt_logprobs or () if one is not None]


def _perplexity(scores: Sequence[Sequence[float]]) -> float:
    flat = [score for chunk in scores for score in chunk]
    return math.exp(-sum(flat) / len(flat))
