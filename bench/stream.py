"""Measure the machine's read bandwidth, which changes from minute to minute, beside every figure that depends on it."""

from __future__ import annotations

from bench import report
from bench.compiled import output
from bench.options import THREADS, Options
from bench.stats import summary

MEBIBYTES, PASSES = 512, 8
"""More than a decode step reads. With 256, L3 caches serve a part: 96 GB/s, while 512 are read at 93, 2048 at 90, and
STREAM's classic loop, which writes between its passes, reads at 92."""


def read_bandwidth(threads: int = THREADS) -> float:
    """Return the bytes per second that ``threads`` threads read together, the best of several passes over 512 MiB."""
    return float(output("stream", threads, MEBIBYTES, PASSES)) * 1e9


def run(options: Options) -> None:
    readings = {str(threads): [read_bandwidth(threads) for _ in range(options.rounds)] for threads in (1, THREADS)}
    rows = [(f"{threads} threads", summary(values).text(1e-9)) for threads, values in readings.items()]
    report.write("stream", "Read bandwidth, GB/s", ("threads", "median (range)"), rows, readings)
