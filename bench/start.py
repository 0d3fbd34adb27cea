"""Measure the time to import the library and to show help, in fresh processes: median of several."""

from __future__ import annotations

import subprocess
import sys
import time

from bench import report
from bench.options import Options
from bench.stats import summary

CASES = {
    "python -c pass": ["-c", "pass"],
    "import nxd_infer": ["-c", "import nxd_infer"],
    "import torch": ["-c", "import torch"],
    "import nxd_infer.parallel_layers": ["-c", "import nxd_infer.parallel_layers.layers"],
    "nxd-infer --help": ["-m", "nxd_infer.cli.main", "--help"],
}


def run(options: Options) -> None:
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(options.rounds):
        for name, arguments in CASES.items():  # interleaved, so that a busy moment affects all of them
            start = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, timeout=120)
            times[name].append(time.perf_counter() - start)
    rows = [(name, summary(values).text(1e3, 0)) for name, values in times.items()]
    columns = ("milliseconds", "median (range)")
    report.write("start", "Start-up, fresh process", columns, rows, times, settings=options.settings())
