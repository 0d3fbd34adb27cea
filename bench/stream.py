"""The machine's read bandwidth, taken beside every figure that depends on it: it moves from minute to minute."""

from __future__ import annotations

from bench import report
from bench.compiled import output
from bench.options import THREADS, Options
from bench.stats import summary

MEBIBYTES, PASSES = 512, 8
"""More than a step of decoding reads. Of 256 the third-level caches answer a part: 96 GB/s where 512 are read at 93,
2048 at 90, and STREAM's classic loop, which writes between its passes, reads at 92."""


def read_bandwidth(threads: int = THREADS) -> float:
    """Bytes a second that ``threads`` threads read together, the best of several passes over 512 MiB."""
    return float(output("stream", threads, MEBIBYTES, PASSES)) * 1e9


def run(options: Options) -> None:
    readings = {str(threads): [read_bandwidth(threads) for _ in range(options.rounds)] for threads in (1, THREADS)}
    rows = [(f"{threads} threads", summary(values).text(1e-9)) for threads, values in readings.items()]
    report.write("stream", "Read bandwidth, GB/s", ("threads", "median (range)"), rows, readings)
