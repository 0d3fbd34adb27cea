"""Measure pipelines: a step over two stages against one process and the bubble's formula, and PyTorch's own schedule.

All train the same chain of equal layers on the same batch, in the same two processes of one thread.
"""

from __future__ import annotations

from bench import report
from bench.options import Options
from bench.pipeline_ranks import MICROBATCHES, STAGES
from bench.stats import Verdict, ratios, summary
from bench.two_ranks import figures_of


def run(options: Options) -> None:
    figures = figures_of("bench.pipeline_ranks", options)
    seconds = figures["seconds"]
    verdicts: list[Verdict] = []
    for count in MICROBATCHES:

        def of(name: str, count: int = count) -> list[float]:
            return seconds[f"{name}, m={count}"]

        ideal = count / (count + STAGES - 1)
        # Two ranks need at least half the time of one process; the bubble takes its share of that.
        reached = [ratio / STAGES / ideal for ratio in ratios(of("one process"), of("1F1B"))]
        verdicts += [
            Verdict(f"1F1B of m/(m+p-1), m={count}", summary(reached), 0.9, 0.95),
            Verdict(f"interleaved over 1F1B, m={count}", summary(ratios(of("interleaved"), of("1F1B"))), 1, 1, "lower"),
            Verdict(f"against PyTorch's 1F1B, m={count}", summary(ratios(of("PyTorch's 1F1B"), of("1F1B"))), 1, 1.05),
        ]
    rows = [(name, summary(found).text(1e3, 1)) for name, found in seconds.items()]
    report.write(
        *("pipeline", "Pipelines", ("median (range)", "milliseconds"), rows, figures),
        verdicts=verdicts,
        settings=options.settings(),
    )
