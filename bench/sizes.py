"""Measure what grows with a model: start to ready, recovery of a rank, other trials, memory of tracing, verifying and
serving.

Random Llamas at degree 2, in the forms of FORMS, for the batches and prompts of BATCHES and PROMPTS. A server runs
alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
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
OF_LARGE = "1,4", "32"
"""Batches and prompts of large models, whose every bucket the eager model repeats."""
BFLOAT16, PACKED = "bfloat16", "bfloat16 packed"
FORMS: dict[str, tuple[str, ...]] = {
    BFLOAT16: (),
    PACKED: ("--packed",),
    "int8": ("--packed", "--quantize", "int8"),
    "int4": ("--packed", "--quantize", "int4"),
}
"""By form of the weights, the options of a trace."""
ON_TRIAL = (BFLOAT16, "int4")
LARGE = 8 << 30
"""Larger files are not traced in bfloat16, which would need the memory of a larger machine; all else is verified."""
LIMITS = {"3.0B bfloat16": ((6.0, 3.0), (6.0, 3.0)), "3.0B bfloat16 packed": ((2.0, 1.0), (6.0, 3.0))}
"""Seconds of a start and of a recovery: the requirement and the aim."""
MEMORY_LIMITS = (24.0, 16.0)
"""GiB that anything may hold."""


def run(options: Options) -> None:
    tiny = options.model == "tiny"
    chosen = {"tiny": TINY} if tiny else {name: SIZES[name] for name in options.sizes}
    folder = options.folder or home() / "sizes"  # the models, their artifacts, and the figures of tracing
    figures: dict[str, dict[str, Any]] = {}
    try:
        for size, sizes in chosen.items():
            model = sized_model(folder, size, sizes)
            large = (model / "model.safetensors").stat().st_size > LARGE
            for form in FORMS:
                if large and form in (BFLOAT16, PACKED):
                    continue
                name = f"{size} {form}"
                path = _artifact(options, folder, name, model, FORMS[form])
                found = figures[name] = measure(options, model, path) | {"trace": _record(folder, name), "trials": {}}
                if large or options.quick:
                    found["verify"] = _verified(path, model)
                if large or form in ON_TRIAL:
                    trials(path, model, found["trials"])
                if large:  # the disk is no larger
                    shutil.rmtree(path)
                    path.with_name(path.name + ".stamp").unlink()
    finally:  # of a trial that failed, too: what was measured before took long
        if figures:
            write(options, figures)


def measure(options: Options, model: Path, path: Path) -> dict[str, Any]:
    """Measure starts, recoveries of each rank in turn, and memory of one artifact."""
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


def _verified(path: Path, model: Path) -> dict[str, float]:
    """Compare an artifact with the eager model; return the seconds, and the memory held in bytes."""
    peak, begin = Peak(), time.perf_counter()
    nxd_infer("verify", path, model, sample=peak)
    return {"seconds": time.perf_counter() - begin, "held": peak.held}


def traced(options: Options, folder: Path, name: str) -> dict[str, Any]:
    """Return figures of tracing one size: ``seconds``, and ``planned``, ``held`` and ``with_files`` in bytes."""
    _artifact(options, folder, f"{name} {BFLOAT16}", sized_model(folder, name, SIZES[name]), ())
    return _record(folder, f"{name} {BFLOAT16}")


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


def _artifact(options: Options, folder: Path, name: str, model: Path, form: Sequence[str]) -> Path:
    large = (model / "model.safetensors").stat().st_size > LARGE
    batches, prompts_ = OF_LARGE if large else (BATCHES, PROMPTS)
    arguments: list[Any] = ["trace", model, "--tp", DEGREE, "--batch-sizes", batches, "--prompt-buckets", prompts_]
    arguments += ["--max-len", 2048, "--dtype", "bfloat16", *form]

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
                f"{verify['seconds']:.0f} s, {verify['held'] / 2**30:.2f} GiB"
                if (verify := found.get("verify"))
                else "",
            )
        )
        for what, measured, limits in zip(
            ("start to ready", "rank killed to ready again"), (start, again), LIMITS.get(name, ()), strict=False
        ):
            verdicts.append(Verdict(f"{name}, {what}", measured, *limits, "lower", "s"))
        verdicts.append(plan_verdict(name, trace))
        held = max(*found["memory"], trace["held"], found.get("verify", trace)["held"]) * 2**-30
        verdicts.append(Verdict(f"{name}, most memory", summary([held]), *MEMORY_LIMITS, "lower", "GiB"))
    columns = (
        "parameters",
        "GiB",
        "start, s",
        "again, s",
        "serving, GiB",
        "tracing (plan), GiB",
        "with files, GiB",
        "verify",
    )
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
