"""Measure prefix caching: the first token of a conversation's next turn, with what came before in the cache or not."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from bench import report
from bench.artifacts import artifact
from bench.model import bench_model, prompts
from bench.options import THREADS, Options
from bench.stats import Verdict, interleaved, ratios, summary
from nxd_server import LLM, SamplingParams
from nxd_server.engine.request import TokenEvent

FIRST, MORE, ANSWER, TURNS = 400, 24, 16, 4
"""Tokens of the first prompt, of each later one, and of each answer."""


def run(options: Options) -> None:
    model = bench_model(options)
    path = artifact(options, 1)
    with (
        LLM(path, threads_per_rank=THREADS, prefix_caching=False) as plain,
        LLM(path, threads_per_rank=THREADS) as caching,
    ):
        work = {
            "plain": lambda number: _turn_seconds(plain, model, number),
            "caching": lambda number: _turn_seconds(caching, model, number),
        }
        for once in work.values():
            once(-1)
        found = interleaved(work, options.rounds)
    gain = summary(ratios(found["plain"], found["caching"]))
    rows = [(name, summary(seconds).text(1e3)) for name, seconds in found.items()]
    report.write(
        *("prefix", "A conversation's next turn, to its first token", ("ms, median (range)", "seconds"), rows, found),
        verdicts=[Verdict(f"turns 2 to {TURNS} of a conversation of {FIRST} tokens", gain, 2.0, 5.0)],
        settings=options.settings(),
    )


def _turn_seconds(llm: LLM, model: Path, number: int) -> float:
    """Return the median seconds to the first token over the later turns of a new conversation."""
    talk, seconds = prompts(model, 1, FIRST, number)[0], []
    for turn in range(TURNS):
        begin = time.perf_counter()
        stream = llm.stream(talk, SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True))
        tokens: list[int] = []
        for event in stream:
            if not tokens:
                seconds.append(time.perf_counter() - begin)
            if isinstance(event, TokenEvent):
                tokens.append(event.token)
        talk = [*talk, *tokens, *prompts(model, 1, MORE, number * TURNS + turn)[0]]
    return statistics.median(seconds[1:])
