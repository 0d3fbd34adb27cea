"""Measure what grows with a model: start to ready, recovery of a rank, other trials, memory of tracing and serving.

Random Llamas in bfloat16, at degree 2, for the batches and prompts of BATCHES and PROMPTS. A server runs alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import report
from bench.artifacts import nxd_infer, sources_digest
from bench.client import load
from bench.model import COMMON, TINY, prompts, stamped, write_llama
from bench.options import Options, home
from bench.process_groups import Peak, memory_of
from bench.recovery import PROMPT, STREAMS, again_after
from bench.server import Server
from bench.stats import Verdict, summary
from bench.trials import trials
from nxd_infer.cli.console import table

SIZES: dict[str, dict[str, int]] = {
    "254M": COMMON | {"max_len": 2048},
    "1.1B": COMMON | {"hidden": 2048, "layers": 22, "intermediate": 5632, "max_len": 2048},
    "3.0B": COMMON | {"hidden": 3072, "layers": 28, "heads": 24, "intermediate": 8192, "max_len": 2048},
    "8.1B": COMMON | {"hidden": 4096, "layers": 36, "heads": 32, "intermediate": 14336, "max_len": 2048},
}
"""Slightly more than 254, 1,130, 3,015 and 8,110 million parameters."""
DEGREE, BATCHES, PROMPTS = 2, "1,4,16", "128,512"
LIMITS = {"3.0B": ((8.0, 4.0), (10.0, 5.0))}
"""Seconds of a start and of a recovery: the requirement and the aim."""


def run(options: Options) -> None:
    tiny = options.model == "tiny"
    chosen = {"tiny": TINY} if tiny else {name: SIZES[name] for name in options.sizes}
    folder = options.folder or home() / "sizes"  # the models, their artifacts, and the figures of tracing
    figures: dict[str, dict[str, Any]] = {}
    try:
        for name, sizes in chosen.items():
            model = sized_model(folder, name, sizes)
            path = _artifact(options, folder, name, model)
            figures[name] = measure(options, model, path) | {"trace": _record(folder, name), "trials": {}}
            trials(path, model, figures[name]["trials"])
    finally:  # of a trial that failed, too: what was measured before took long
        if figures:
            write(options, figures)


def measure(options: Options, model: Path, path: Path) -> dict[str, Any]:
    """Measure starts, recoveries and memory of one artifact."""
    found: dict[str, Any] = {
        "bytes": (model / "model.safetensors").stat().st_size,
        "start_seconds": [],
        "recovery_seconds": [],
        "memory": [],
    }
    for number in range(2 if options.quick else min(3, options.rounds)):
        with Server(path) as server:
            found["start_seconds"].append(server.seconds)
            load(server.port, prompts(model, STREAMS, PROMPT, number), 16)
            found["memory"].append(memory_of(server.pid))
            found["recovery_seconds"].append(asyncio.run(again_after(signal.SIGKILL, server, model, number)))
            server.stop()
    return found


def traced(options: Options, folder: Path, name: str) -> dict[str, Any]:
    """Return figures of tracing one size: ``seconds``, and ``planned``, ``held`` and ``with_files`` in bytes."""
    _artifact(options, folder, name, sized_model(folder, name, SIZES[name]))
    return _record(folder, name)


def _record(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.trace.json").read_text())


def plan_verdict(name: str, trace: Mapping[str, Any]) -> Verdict:
    """Return the verdict on a plan, which must be close to what the machine needed."""
    off = abs(trace["planned"] / trace["held"] - 1)
    return Verdict(f"{name}, plan of tracing's memory, off by", summary([off]), 0.10, 0.05, "lower")


def sized_model(folder: Path, name: str, sizes: Mapping[str, int]) -> Path:
    """Return the directory of a model of ``sizes``, after creating it if needed."""
    key = hashlib.sha256((Path(__file__).with_name("model.py")).read_bytes() + repr(sizes).encode()).hexdigest()
    return stamped(folder / "models" / name, key, lambda path: write_llama(path, **sizes))


def _artifact(options: Options, folder: Path, name: str, model: Path) -> Path:
    arguments: list[Any] = ["trace", model, "--tp", DEGREE, "--batch-sizes", BATCHES, "--prompt-buckets", PROMPTS]
    arguments += ["--max-len", 2048, "--dtype", "bfloat16"]

    def make(path: Path) -> None:
        peak = Peak()
        begin = time.perf_counter()
        # The plan counts compilation: no graph may come from the cache.
        environment = {**os.environ, "COLUMNS": "200", "NXD_INFER_CACHE_LIMIT": "0"}
        text = nxd_infer(*arguments, "--out", path, env=environment, sample=peak)
        found = {
            "seconds": time.perf_counter() - begin,
            "planned": planned(text),
            "held": peak.held,
            "with_files": peak.with_files,
        }
        (folder / f"{name}.trace.json").write_text(json.dumps(found))

    key = f"{sources_digest()} {model.with_name(model.name + '.stamp').read_text()} {arguments}"
    return stamped(folder / "artifacts" / name, key, make)


def planned(text: str) -> int:
    """Return the planned peak in bytes from a trace's output."""
    found = re.search(r"peak memory, tracing\s+about ([\d.]+) (MiB|GiB)", text)
    if found is None:
        raise SystemExit(f"the trace announced no peak of memory:\n{text}")
    return int(float(found[1]) * {"MiB": 2**20, "GiB": 2**30}[found[2]])


def write(options: Options, figures: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the table and the record."""
    rows, verdicts = [], []
    for name, found in figures.items():
        start, again = summary(found["start_seconds"]), summary(found["recovery_seconds"])
        trace = found["trace"]
        off = trace["planned"] / trace["held"] - 1
        rows.append(
            (
                *(name, f"{found['bytes'] / 2**30:.2f}", start.text(digits=1), again.text(digits=1)),
                summary(found["memory"]).text(2**-30, 2),
                f"{trace['held'] / 2**30:.2f} ({off:+.0%})",
                f"{trace['with_files'] / 2**30:.2f}",
            )
        )
        for what, measured, limits in zip(
            ("start to ready", "rank killed to ready again"), (start, again), LIMITS.get(name, ()), strict=False
        ):
            verdicts.append(Verdict(f"{name}, {what}", measured, *limits, "lower", "s"))
        verdicts.append(plan_verdict(name, trace))
    columns = ("parameters", "GiB", "start, s", "again, s", "serving, GiB", "tracing (plan), GiB", "with files, GiB")
    come = {name: found["trials"] for name, found in figures.items()}
    kinds = dict.fromkeys(kind for found in come.values() for kind in found)
    table(
        "Survived under load, seconds",
        ("parameters", *kinds),
        [(name, *(f"{found[key]:.1f}" if key in found else "" for key in kinds)) for name, found in come.items()],
    )
    report.write(
        *("sizes", f"Sizes, tp {DEGREE}", columns, rows, dict(figures)),
        verdicts=verdicts,
        settings=options.settings(),
    )
