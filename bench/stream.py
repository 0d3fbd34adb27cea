"""The machine's read bandwidth, taken beside every figure that depends on it: it moves from minute to minute."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from bench import report
from bench.options import THREADS, Options, home
from bench.stats import summary

SOURCE = Path(__file__).with_name("stream.c")
FLAGS = ("-x", "c", "-std=gnu11", "-O3", "-march=native", "-funroll-loops", "-pthread")
MEBIBYTES, PASSES = 512, 8


def program() -> Path:
    """The compiled reader, made with the compiler that tracing needs and kept by its content."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise SystemExit("the bandwidth reading needs the compiler that tracing needs: install g++, or set CXX")
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join((compiler, *FLAGS)).encode()).hexdigest()[:12]
    path = home() / f"stream-{digest}"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(part)], check=True, timeout=120)
        part.replace(path)
    return path


def read_bandwidth(threads: int = THREADS) -> float:
    """Bytes a second that ``threads`` threads read together, the best of several passes over 512 MiB."""
    command = [str(program()), str(threads), str(MEBIBYTES), str(PASSES)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout) * 1e9


def run(options: Options) -> None:
    readings = {str(threads): [read_bandwidth(threads) for _ in range(options.rounds)] for threads in (1, THREADS)}
    rows = [(f"{threads} threads", summary(values).text(1e-9)) for threads, values in readings.items()]
    report.write("stream", "Read bandwidth, GB/s", ("threads", "median (range)"), rows, readings)
