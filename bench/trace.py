"""Measure a trace: graphs at tp 1, 2, 4 and 8, memory against plan, memory per bucket; and seconds, over layers and
degrees.

nxd-infer trace MODEL --tp N --batch-sizes 1,4,16 --prompt-buckets 128,512 --max-len 1024
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import report, sizes
from bench.artifacts import nxd_infer
from bench.model import COMMON, write_llama
from bench.options import Options, home
from bench.process_groups import Peak, memory_of
from bench.stats import Verdict, interleaved, ratios, summary

DEGREES, QUICK_DEGREES = (1, 2, 4, 8), (1, 2)
BATCHES, PROMPTS, MAX_LEN = "1,4,16", "128,512", "1024"
NARROW = {"hidden": 256, "heads": 4, "kv_heads": 2, "intermediate": 512, "vocab": 1024}
"""Hardly any weights: the time of a trace is that of its graphs."""
SECONDS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "demo, tp 2": (
        {**NARROW, "layers": 3, "intermediate": 704, "vocab": 4096},
        {"tp": 2, "batches": "1,4", "prompts": "32,128"},
    ),
    "254M, tp 1": (COMMON, {"tp": 1}),
    "254M, tp 2": (COMMON, {"tp": 2}),
    "4 layers": ({**NARROW, "layers": 4}, {"tp": 1}),
    "28 layers": ({**NARROW, "layers": 28}, {"tp": 1}),
    "9 heads, tp 1": ({**NARROW, "hidden": 576, "heads": 9, "kv_heads": 3, "layers": 30}, {"tp": 1}),
    "9 heads, tp 3": ({**NARROW, "hidden": 576, "heads": 9, "kv_heads": 3, "layers": 30}, {"tp": 3}),
}
"""What is traced: sizes of a model, and how it is traced."""


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
    seconds = {} if options.quick else _seconds(options.rounds)
    figures["seconds"] = seconds
    rows += [(name, "", "", summary(found).text() + " s") for name, found in seconds.items()]
    low, high = degrees[0], degrees[-1]
    ratio = figures[f"tp{high}"]["graphs"] / figures[f"tp{low}"]["graphs"]
    verdicts = [
        Verdict(f"graphs at tp {high} over tp {low}", summary([ratio]), 1.0, 1.0, "lower"),
        Verdict("MB for one more bucket", summary([further / 1e6]), 5.0, 5.0, "lower"),
        *(sizes.plan_verdict(name, found) for name, found in memory.items()),
        *(_verdicts(seconds) if seconds else ()),
    ]
    report.write(
        *("trace", "Tracing the CLI example", ("degree", "graphs", "compiled", "figure"), rows, figures),
        verdicts=verdicts,
        settings=options.settings(),
    )
    if short := [verdict.row for verdict in verdicts if verdict.result == "short"]:
        raise SystemExit(f"short of the table: {'; '.join(short)}")


def _seconds(rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each of ``SECONDS``, from the command to the artifact, in turns."""

    def trace(name: str) -> float:
        (shape, how), out = SECONDS[name], work / "artifact"
        model = work / "models" / "-".join(map(str, shape.values()))
        if not model.exists():
            write_llama(model, **shape)
        return _trace(model, out, cache=work / "cache", **how)["seconds"]

    with tempfile.TemporaryDirectory(prefix="nxd-bench-") as folder:
        work = Path(folder)
        trace("4 layers")  # builds the native operators, and reads torch from the disk
        return interleaved({name: lambda _, name=name: trace(name) for name in SECONDS}, rounds)


def _verdicts(seconds: Mapping[str, list[float]]) -> Iterator[Verdict]:
    for name, must, aim in (("demo, tp 2", 15.0, 8.0), ("254M, tp 1", 25.0, 12.0), ("254M, tp 2", 25.0, 12.0)):
        yield Verdict(f"{name}, trace and save", summary(seconds[name]), must, aim, "lower", "s")
    for more, few in (("28 layers", "4 layers"), ("9 heads, tp 3", "9 heads, tp 1")):
        yield Verdict(f"seconds, {more} over {few}", summary(ratios(seconds[more], seconds[few])), 1.5, 1.1, "lower")


def _trace(
    model: Path,
    out: Path,
    tp: int,
    cache: Path,
    batches: str = BATCHES,
    prompts: str = PROMPTS,
    further: tuple[str, ...] = (),
) -> Any:
    """Trace through the command line: return graphs, compiled graphs, seconds, memory and its plan."""
    start, peak = time.perf_counter(), Peak()
    text = nxd_infer(
        *("trace", model, "--tp", tp, "--out", out, "--batch-sizes", batches, "--prompt-buckets", prompts),
        *("--max-len", MAX_LEN, *further),
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
