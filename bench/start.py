"""Time to import the library and to show help, each in a fresh process: median of several."""

from __future__ import annotations

import subprocess
import sys
import time

from bench import report

RUNS = 5
CASES = {
    "python -c pass": ["-c", "pass"],
    "import nxd_infer": ["-c", "import nxd_infer"],
    "import torch": ["-c", "import torch"],
    "import nxd_infer.parallel_layers": ["-c", "import nxd_infer.parallel_layers.layers"],
    "nxd-infer --help": ["-m", "nxd_infer.cli.main", "--help"],
}


def run() -> None:
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(RUNS):
        for name, arguments in CASES.items():  # interleaved, so that a busy moment touches all of them
            start = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, timeout=120)
            times[name].append(time.perf_counter() - start)
    rows = [
        (name, f"{report.median(values) * 1000:.0f} ms", f"{min(values) * 1000:.0f}-{max(values) * 1000:.0f} ms")
        for name, values in times.items()
    ]
    report.write("start", "Start-up, fresh process", ("what", "median", "spread"), rows, times)
