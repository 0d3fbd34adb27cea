"""Measure speculation: decoding with drafts over without, with all drafts right, some, and none; drafts of the text
itself, and of a smaller model."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import report
from bench.artifacts import artifact
from bench.model import bench_model, prompts
from bench.options import THREADS, Options
from bench.stats import Verdict, interleaved, ratios, summary
from nxd_server import LLM, SamplingParams

GUESSES = 4
BATCHES = (1, 4)
PROMPT, NEW_TOKENS = 16, 128
TEXTS = {
    "one token again and again": SamplingParams(temperature=0, logit_bias={100: 100.0}),
    "eight tokens, as the model likes": SamplingParams(temperature=0, logit_bias=dict.fromkeys(range(100, 108), 100.0)),
    "drawn, nothing repeats": SamplingParams(temperature=1, seed=1),
}
"""Whether a random model's text repeats is chance; the bias, equal on both sides, determines it."""
LIMITS = {"one token again and again": (1.2, 2.0), "drawn, nothing repeats": (0.95, 1.0)}


def run(options: Options) -> None:
    model = bench_model(options)
    path = artifact(options, 1, BATCHES, (PROMPT,), GUESSES)
    smaller = artifact(replace(options, model=f"{options.model}-draft"), 1, BATCHES, (PROMPT,), GUESSES)
    figures: dict[str, Any] = {}
    rows, verdicts = [], []
    with (
        LLM(path, threads_per_rank=THREADS) as plain,
        LLM(path, threads_per_rank=THREADS, speculate=GUESSES) as guessing,
        LLM(path, threads_per_rank=THREADS, draft=smaller) as drafting,
    ):
        for text, params in TEXTS.items():
            for batch, (how, llm) in itertools.product(BATCHES, (("", guessing), (", a draft model", drafting))):
                name = f"{text}, batch {batch}{how}"
                found = figures[name] = _measure(options, model, plain, llm, params, batch)
                gain = summary(ratios(found["guessing"], found["plain"]))
                rows.append(
                    (
                        *(name, summary(found["plain"]).text(), summary(found["guessing"]).text()),
                        *(gain.text(digits=2), str(found["guessed"]), str(found["right"])),
                        f"{sum(found['same'])} of {len(found['same'])}",
                    )
                )
                if text in LIMITS:
                    verdicts.append(Verdict(f"speculation: {name}", gain, *LIMITS[text]))
    columns = ("tokens/s, median (range)", "plain", "with guesses", "ratio", "guessed", "right", "same answers")
    report.write(
        *("speculate", f"Decoding with up to {GUESSES} guesses", columns, rows, figures),
        verdicts=verdicts,
        settings=options.settings(),
    )


def _measure(
    options: Options, model: Path, plain: LLM, guessing: LLM, params: SamplingParams, batch: int
) -> dict[str, Any]:
    """Return tokens per second of both by round, the drafts of all rounds, and the rounds with equal answers."""
    params = params.replace(max_tokens=32 if options.quick else NEW_TOKENS, ignore_eos=True)
    answers: dict[str, list[list[list[int]]]] = {"plain": [], "guessing": []}

    def rate(llm: LLM, number: int) -> float:
        asked = prompts(model, batch, PROMPT, number)
        begin = time.perf_counter()
        outputs = llm.generate(asked, params)
        seconds = time.perf_counter() - begin
        answers["plain" if llm is plain else "guessing"].append([one.outputs[0].token_ids for one in outputs])
        return sum(one.usage.completion_tokens for one in outputs) / seconds

    work = {"plain": lambda number: rate(plain, number), "guessing": lambda number: rate(guessing, number)}
    for once in work.values():
        once(-1)
    before = _counts(guessing)
    found = interleaved(work, options.rounds)
    guessed, right = (now - then for now, then in zip(_counts(guessing), before, strict=True))
    same = [a == b for a, b in zip(*answers.values(), strict=True)][1:]
    return {**found, "guessed": guessed, "right": right, "same": same}


def _counts(llm: LLM) -> tuple[int, int]:
    stats = llm.engine.stats() if llm.engine is not None else None
    return (stats.draft_tokens, stats.accepted_tokens) if stats is not None else (0, 0)
