"""What grows with a model: start to ready, a rank's death to ready again, memory of tracing and of serving.

Random Llamas in bfloat16, at degree 2, for the batches and prompts of BATCHES and PROMPTS. A server runs alone.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from bench.client import Stream, load, stream
from bench.model import COMMON, TINY, prompts, stamped, write_llama
from bench.options import Options, home
from bench.processes import Peak, memory_of, tree
from bench.server import Server
from bench.stats import Verdict, summary
from nxd_infer.cli.demo.run import ready

SIZES: dict[str, dict[str, int]] = {
    "254M": COMMON | {"max_len": 2048},
    "1.1B": COMMON | {"hidden": 2048, "layers": 22, "intermediate": 5632, "max_len": 2048},
    "3.0B": COMMON | {"hidden": 3072, "layers": 28, "heads": 24, "intermediate": 8192, "max_len": 2048},
}
"""A little more than 254, 1,130 and 3,015 million parameters."""
DEGREE, BATCHES, PROMPTS = 2, "1,4,16", "128,512"
STREAMS, PROMPT = 4, 64
LIMITS = {"3.0B": ((8.0, 4.0), (10.0, 5.0))}
"""Seconds of a start and of a recovery: what they must be, and what they should be."""
DOWN_SECONDS, AGAIN_SECONDS = 20.0, 120.0
"""How long a killed rank may go unnoticed, and a server may take until it is ready again."""


def run(options: Options) -> None:
    tiny = options.model == "tiny"
    chosen = {"tiny": TINY} if tiny else {name: SIZES[name] for name in options.sizes}
    folder = options.folder or home() / "sizes"
    figures = {name: measure(options, folder, name, sizes) for name, sizes in chosen.items()}
    write(options, figures)


def measure(options: Options, folder: Path, name: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Every reading of one size. The model, its artifact and what tracing took are kept in ``folder``."""
    model = _model(folder, name, sizes)
    path = _artifact(options, folder, name, model)
    found: dict[str, Any] = {
        "bytes": (model / "model.safetensors").stat().st_size,
        "trace": _record(folder, name),
        "start_seconds": [],
        "recovery_seconds": [],
        "memory": [],
    }
    for number in range(2 if options.quick else min(3, options.rounds)):
        with Server(path) as server:
            found["start_seconds"].append(server.seconds)
            load(server.port, prompts(model, STREAMS, PROMPT, number), 16)
            found["memory"].append(memory_of(server.pid))
            found["recovery_seconds"].append(asyncio.run(recovery(server, model, number)))
            server.stop()
    return found


def traced(options: Options, folder: Path, name: str) -> dict[str, Any]:
    """What tracing one size took: ``seconds``, ``planned``, ``held`` and ``with_files``, the latter in bytes."""
    _artifact(options, folder, name, _model(folder, name, SIZES[name]))
    return _record(folder, name)


def _record(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.trace.json").read_text())


def plan_verdict(name: str, trace: Mapping[str, Any]) -> Verdict:
    """A plan has to be near what the machine needed."""
    off = abs(trace["planned"] / trace["held"] - 1)
    return Verdict(f"{name}, plan of tracing's memory, off by", summary([off]), 0.10, 0.05, "lower")


def _model(folder: Path, name: str, sizes: Mapping[str, int]) -> Path:
    key = hashlib.sha256((Path(__file__).with_name("model.py")).read_bytes() + repr(sizes).encode()).hexdigest()
    return stamped(folder / "models" / name, key, lambda path: write_llama(path, **sizes))


def _artifact(options: Options, folder: Path, name: str, model: Path) -> Path:
    arguments: list[Any] = ["trace", model, "--tp", DEGREE, "--batch-sizes", BATCHES, "--prompt-buckets", PROMPTS]
    arguments += ["--max-len", 2048, "--dtype", "bfloat16"]
    if options.model == "tiny":
        arguments += ["--backend", "eager"]

    def make(path: Path) -> None:
        peak = Peak()
        begin = time.perf_counter()
        # The plan counts what compiles: no graph may come from the cache.
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
    """The bytes of the peak that a trace's plan, in what it printed, announces."""
    found = re.search(r"peak memory, tracing\s+about ([\d.]+) (MiB|GiB)", text)
    if found is None:
        raise SystemExit(f"the trace announced no peak of memory:\n{text}")
    return int(float(found[1]) * {"MiB": 2**20, "GiB": 2**30}[found[2]])


async def recovery(server: Server, model: Path, number: int) -> float:
    """Seconds from the end of a rank, while it answers streams, until the server is ready again."""
    streams = [Stream(0.0) for _ in range(STREAMS)]
    tasks = [
        asyncio.create_task(stream(server.port, prompt, 256, into))
        for prompt, into in zip(prompts(model, STREAMS, PROMPT, 100 + number), streams, strict=True)
    ]
    while not all(one.times or one.error for one in streams):
        await asyncio.sleep(0.01)
    begin = time.perf_counter()
    os.kill(ranks_of(server.pid)[-1], signal.SIGKILL)
    try:
        await _until(server, False, DOWN_SECONDS)
        await _until(server, True, AGAIN_SECONDS)
        return time.perf_counter() - begin
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def ranks_of(pid: int) -> list[int]:
    """The rank processes that a server has started."""
    found = []
    for process in tree(pid):
        with contextlib.suppress(OSError):
            if b"nxd_infer.trace.worker" in Path(f"/proc/{process}/cmdline").read_bytes():
                found.append(process)
    return found


async def _until(server: Server, wanted: bool, seconds: float) -> None:
    end = time.perf_counter() + seconds
    while await asyncio.to_thread(ready, server.port) is not wanted:
        if not server.alive() or time.perf_counter() > end:
            raise SystemExit(f"the server was not ready again after a rank's death:\n{server.tail()}")
        await asyncio.sleep(0.01)


def write(options: Options, figures: Mapping[str, Mapping[str, Any]]) -> None:
    """The table and the record."""
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
    report.write(
        *("sizes", f"Sizes, tp {DEGREE}", columns, rows, dict(figures)),
        verdicts=verdicts,
        settings=options.settings(),
    )
