"""Measure pipeline stages in inference: eight streams with every stage at work, against one stage at a time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from bench import report
from bench.artifacts import artifact
from bench.model import bench_model, prompts
from bench.options import Options
from bench.stats import Verdict, interleaved, ratios, summary
from nxd_server import LLM, SamplingParams

STAGES, STREAMS, PIECE, SHORT = 2, 8, 128, 16
WORK = {"decoding": (SHORT, 128), "prompts": (PIECE, 1), "prompts and decoding": (PIECE, 32)}
"""Tokens of each prompt, and of each answer. A short prompt has a bucket of its own: padded to a long one, eight of
them would take longer than the decoding that follows."""
BUSY, SHARES, WHOLE = "every stage at work", "one stage at a time, same shares", "one stage at a time, all streams"


def run(options: Options) -> None:
    """Three ways to serve eight streams with one artifact: shares of four in flight; the same shares, one step after
    another; and all streams in each step, one after another.

    A step that reads the weights for eight rows takes hardly longer than one for four, if it is bound by reading them:
    then the second way shows what the stages gain by working at once, and the third what the shares cost.
    """
    model = bench_model(options)
    path = artifact(options, 1, (STREAMS // STAGES, STREAMS), (SHORT, PIECE), pp=STAGES)
    ways = {BUSY: (STAGES, STAGES + 1), SHARES: (STAGES, 1), WHOLE: (1, 1)}
    found: dict[str, dict[str, list[float]]] = {}
    with LLM(path, threads_per_rank=1) as llm:
        for name, lengths in WORK.items():

            def rate(number: int, way: str, lengths: tuple[int, int] = lengths) -> float:
                return _rate(llm, model, number, *ways[way], *lengths)

            for way in ways:
                rate(-1, way)
            work = {way: lambda number, way=way, rate=rate: rate(number, way) for way in ways}
            found[name] = interleaved(work, options.rounds)
        steps = llm.engine.stats().step_seconds if llm.engine is not None else {}
    rows, verdicts = [], []
    for name, rates in found.items():
        gains = {way: summary(ratios(rates[BUSY], rates[way])) for way in (SHARES, WHOLE)}
        rows.append((name, *(summary(rates[way]).text() for way in ways), *(g.text(digits=2) for g in gains.values())))
        verdicts.append(Verdict(f"stages: {name}, over one stage at a time", gains[SHARES], 1.5, 1.8))
        verdicts.append(Verdict(f"stages: {name}, over steps of all streams", gains[WHOLE], 0.95, 1.5))
    columns = ("tokens/s, median (range)", *ways, "gain", "over all streams")
    report.write(
        *("stages", f"{STREAMS} streams over {STAGES} stages", columns, rows),
        {"rates": found, "step_seconds": steps},
        verdicts=verdicts,
        settings={**options.settings(), "threads": 1},
    )


def _rate(llm: LLM, model: Path, number: int, groups: int, depth: int, prompt: int, answer: int) -> float:
    """Return tokens per second of eight streams: those of the answers, or of the prompts if an answer is one token."""
    engine: Any = llm.engine  # the engine always overlaps: only this comparison does not
    engine._scheduler.groups, engine.depth = groups, depth
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate(prompts(model, STREAMS, prompt, number), params)
    seconds = time.perf_counter() - started
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return (tokens if answer > 1 else STREAMS * prompt) / seconds
