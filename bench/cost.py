"""What a trace costs: graphs compiled at tp 1, 2 and 4 and the second time, loading, memory a bucket, time to ready.

nxd-infer trace MODEL --tp N --batch-sizes 1,4,16 --prompt-buckets 128,512 --max-len 1024
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import report
from bench.model import write_llama
from nxd_infer.cli.demo.run import free_port, ready

BATCHES, PROMPTS, MAX_LEN = "1,4,16", "128,512", "1024"
READY_TIMEOUT = 120.0


def command(*arguments: object, env: dict[str, str], timeout: float = 1800) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "nxd_infer.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=env,
    )
    if done.returncode:
        raise SystemExit(f"nxd-infer {' '.join(map(str, arguments))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def trace(model: Path, out: Path, tp: int, env: dict[str, str], batches: str = BATCHES, prompts: str = PROMPTS) -> Any:
    """Run the CLI example; (graphs, compiled now, seconds)."""
    start = time.perf_counter()
    text = command(
        *("trace", model, "--tp", tp, "--out", out, "--batch-sizes", batches, "--prompt-buckets", prompts),
        *("--max-len", MAX_LEN),
        env=env,
    )
    found = re.search(r"(\d+) graphs \((\d+) compiled now\)", text)
    if found is None:
        raise SystemExit(f"the trace did not say how many graphs it compiled:\n{text}")
    return int(found[1]), int(found[2]), time.perf_counter() - start


def resident(artifact: Path) -> int:
    """Private plus shared-clean resident bytes of rank 0 after every graph has run once."""
    from nxd_infer import trace as nxd_trace

    with nxd_trace.parallel_model_load(str(artifact), in_process=False) as model:
        model.warmup()
        pid = model.health()[0].pid
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
        return int(fields["Rss"].split()[0]) * 1024


def start_to_ready(artifact: Path, env: dict[str, str]) -> float:
    """Seconds from the start of the server process until ``/readyz`` answers 200."""
    port = free_port()
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "nxd_infer.cli.main", "serve", str(artifact), "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=env,
    )
    try:
        while not ready(port):
            if process.poll() is not None or time.perf_counter() - start > READY_TIMEOUT:
                raise SystemExit("the server did not become ready")
            time.sleep(0.02)
        return time.perf_counter() - start
    finally:
        process.terminate()
        process.wait(60)


def run() -> None:
    with tempfile.TemporaryDirectory(prefix="nxd-bench-") as folder:
        work = Path(folder)
        env = {**os.environ, "NXD_INFER_CACHE": str(work / "cache"), "COLUMNS": "200"}
        model = write_llama(work / "model")
        figures: dict[str, Any] = {}
        rows = []
        for tp in (1, 2, 4):
            env_tp = {**env, "NXD_INFER_CACHE": str(work / f"cache{tp}")}
            graphs, compiled, seconds = trace(model, work / f"tp{tp}", tp, env_tp)
            again = trace(model, work / f"tp{tp}b", tp, env_tp)
            figures[f"tp{tp}"] = {"graphs": graphs, "compiled": compiled, "seconds": seconds, "again": again}
            rows.append(
                (f"tp {tp}", f"{graphs}", f"{compiled}", f"{seconds:.1f} s", f"{again[1]}", f"{again[2]:.1f} s")
            )
        columns = ("degree", "graphs", "compiled", "trace", "compiled again", "trace again")
        report.write("trace", "Tracing the CLI example", columns, rows, figures)

        # The largest batch and the longest prompt in both, so that caches and working memory are the same.
        trace(model, work / "one", 1, {**env, "NXD_INFER_CACHE": str(work / "cache1")}, "16", "512")
        before, after = resident(work / "one"), resident(work / "tp1")
        growth = (after - before) / 3
        # A compiler that is not there cannot be run: loading with an empty PATH shows that it compiles nothing.
        ready_seconds = sorted(start_to_ready(work / "tp2", {**env, "PATH": "/nonexistent"}) for _ in range(3))
        weights = (work / "tp1" / "weights" / "rank_00.safetensors").stat().st_size
        report.write(
            "load",
            "Loading and serving",
            ("what", "figure"),
            [
                ("weights of rank 0 at tp 1", f"{weights / 1e6:.0f} MB"),
                ("resident, 2 buckets", f"{before / 1e6:.0f} MB"),
                ("resident, 5 buckets", f"{after / 1e6:.0f} MB"),
                ("for each further bucket", f"{growth / 1e6:.1f} MB"),
                ("server start to ready, tp 2, no compiler on PATH", f"{ready_seconds[1]:.1f} s"),
            ],
            {"resident_2": before, "resident_5": after, "growth": growth, "ready": ready_seconds},
        )
