"""Measure a trace: graphs compiled at tp 1, 2, 4 and 8 and in a second trace, memory against plan, memory per bucket.

nxd-infer trace MODEL --tp N --batch-sizes 1,4,16 --prompt-buckets 128,512 --max-len 1024
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import report, sizes
from bench.artifacts import nxd_infer
from bench.model import write_llama
from bench.options import Options, home
from bench.process_groups import Peak, memory_of
from bench.stats import Verdict, summary

DEGREES, QUICK_DEGREES = (1, 2, 4, 8), (1, 2)
BATCHES, PROMPTS, MAX_LEN = "1,4,16", "128,512", "1024"


def run(options: Options) -> None:
    with tempfile.TemporaryDirectory(prefix="nxd-bench-") as folder:
        work = Path(folder)
        model = write_llama(work / "model", heads=8, kv_heads=4)
        figures: dict[str, Any] = {}
        rows = []
        degrees = QUICK_DEGREES if options.quick else DEGREES
        for tp in degrees:
            # A separate cache: graphs compiled at one degree must not help the next.
            found = _trace(model, work / f"tp{tp}", tp, work / f"cache{tp}")
            figures[f"tp{tp}"] = found
            rows.append((f"tp {tp}", f"{found['graphs']}", f"{found['compiled']}", f"{found['seconds']:.1f} s"))
        again = _trace(model, work / "again", 1, work / "cache1")
        figures["again"] = again
        rows.append(("tp 1 again", f"{again['graphs']}", f"{again['compiled']}", f"{again['seconds']:.1f} s"))
        # Not of the second trace: cached graphs need less than the plan.
        memory = {f"tp {tp}": figures[f"tp{tp}"] for tp in degrees}
        # The largest batch and the longest prompt in both, so that caches and working memory are equal.
        few = _trace(model, work / "fewer", 1, work / "cache1", batches="16", prompts="512")["graphs"]
        fewer, more = _resident(work / "fewer"), _resident(work / "tp1")
        further = (more - fewer) / (again["graphs"] - few)
        figures["resident"] = {"fewer buckets": fewer, "all buckets": more, "further bucket": further}
    rows.append(("memory for one more bucket", "", "", f"{further / 2**20:.1f} MiB"))
    if not options.quick:
        figures["sizes"] = {
            name: sizes.traced(options, options.folder or home() / "sizes", name) for name in options.sizes
        }
        memory |= figures["sizes"]
    for name, found in memory.items():
        planned, held = found["planned"], found["held"]
        figure = f"{planned / 2**30:.2f} planned, {held / 2**30:.2f} measured: {planned / held:.2f}"
        rows.append((f"{name}, GiB of memory", "", "", figure))
    low, high = degrees[0], degrees[-1]
    ratio = figures[f"tp{high}"]["compiled"] / figures[f"tp{low}"]["compiled"]
    verdicts = [
        Verdict(f"graphs compiled at tp {high} over tp {low}", summary([ratio]), 1.0, 1.0, "lower"),
        Verdict("MB for one more bucket", summary([further / 1e6]), 5.0, 5.0, "lower"),
        *(sizes.plan_verdict(name, found) for name, found in memory.items()),
    ]
    report.write(
        *("trace", "Tracing the CLI example", ("degree", "graphs", "compiled", "figure"), rows, figures),
        verdicts=verdicts,
        settings=options.settings(),
    )
    if short := [verdict.row for verdict in verdicts if verdict.result == "short"]:
        raise SystemExit(f"short of the table: {'; '.join(short)}")


def _trace(model: Path, out: Path, tp: int, cache: Path, batches: str = BATCHES, prompts: str = PROMPTS) -> Any:
    """Trace through the command line: return graphs, compiled graphs, seconds, memory and its plan."""
    start, peak = time.perf_counter(), Peak()
    text = nxd_infer(
        *("trace", model, "--tp", tp, "--out", out, "--batch-sizes", batches, "--prompt-buckets", prompts),
        *("--max-len", MAX_LEN),
        env={**os.environ, "NXD_INFER_CACHE": str(cache), "COLUMNS": "200"},
        sample=peak,
    )
    found = re.search(r"(\d+) graphs \((\d+) compiled now\)", text)
    if found is None:
        raise SystemExit(f"the trace did not say how many graphs it compiled:\n{text}")
    return {
        "graphs": int(found[1]),
        "compiled": int(found[2]),
        "seconds": time.perf_counter() - start,
        "planned": sizes.planned(text),
        "held": peak.held,
    }


def _resident(artifact: Path) -> int:
    """Return the bytes that rank 0 holds after every graph has run once."""
    from nxd_infer.trace import parallel_model_load

    with parallel_model_load(str(artifact), in_process=False) as model:
        model.warmup()
        pid = model.health()[0].pid
        assert pid is not None
        return memory_of(pid)
