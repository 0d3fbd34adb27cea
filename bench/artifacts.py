"""The traced model of the benchmarks, one artifact per degree, traced again when the sources change."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.model import bench_model, stamped
from bench.options import Options, home
from bench.process_groups import ROOT, Group, environment

BATCHES, PROMPTS = (1, 4, 16), (32, 128, 512)
TRACE_SECONDS = 1800.0


def nxd_infer(
    *arguments: object,
    env: dict[str, str] | None = None,
    timeout: float = TRACE_SECONDS,
    sample: Callable[[int], None] | None = None,
    root: Path = ROOT,
) -> str:
    """Run an `nxd-infer` command and return its output; a failure ends the benchmark with that output.

    ``sample`` is called with its process up to twenty times per second, and takes a tenth of the time at most: of a
    large process its memory takes long to read. ``root`` is the checkout to run.
    """
    words = [sys.executable, "-m", "nxd_infer.cli.main", *map(str, arguments)]
    log = home() / "logs" / f"command-{os.getpid()}.log"
    with Group(words, log, env={**environment(root), "COLUMNS": "200"} if env is None else env, cwd=root) as group:
        end, pause = time.monotonic() + timeout, 0.05
        while (status := _status(group, timeout if sample is None else pause)) is None:
            if time.monotonic() > end:
                raise SystemExit(f"{' '.join(words)} took longer than {timeout:.0f} s:\n{group.tail()}")
            if sample is not None:
                begin = time.monotonic()
                sample(group.pid)
                pause = max(0.05, 9 * (time.monotonic() - begin))
    if status:
        raise SystemExit(f"{' '.join(words)} ended with status {status}:\n{group.tail()}")
    return log.read_text(errors="replace")


def _status(group: Group, seconds: float) -> int | None:
    """Return the exit status, or None if the command still runs after ``seconds``."""
    try:
        return group.process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def sources_digest(root: Path = ROOT) -> str:
    """Return a digest of everything that affects the result of a trace."""
    digest = hashlib.sha256(torch.__version__.encode())
    for folder in ("nxd_infer", "models"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def artifact(
    options: Options,
    tp: int,
    batches: Sequence[int] = BATCHES,
    prompts: Sequence[int] = PROMPTS,
    speculate: int = 0,
    root: Path = ROOT,
    pp: int = 1,
    further: Sequence[str] = (),
) -> Path:
    """Return the model of ``options`` traced in bfloat16 at degree ``tp`` and with ``pp`` pipeline stages, for all
    measured batches and prompts, by the code of the checkout ``root``, with ``further`` arguments."""
    model = bench_model(options)
    arguments: list[Any] = ["trace", model, "--tp", tp, "--batch-sizes", ",".join(map(str, batches))]
    arguments += ["--prompt-buckets", ",".join(map(str, prompts)), "--max-len", 4096, "--dtype", "bfloat16"]
    name = f"{options.model}-tp{tp}"
    if speculate:
        arguments += ["--speculate", speculate]
        name += f"-speculate{speculate}"
    if pp > 1:
        arguments += ["--pp", pp]
        name += f"-pp{pp}"
    if further or batches != BATCHES:
        arguments += further
        name += f"-b{max(batches)}-{'-'.join(further).strip('-') or 'family'}"
    if root != ROOT:
        name += f"-{hashlib.sha256(str(root).encode()).hexdigest()[:8]}"
    key = f"{sources_digest(root)} {model.with_name(model.name + '.stamp').read_text()} {arguments}"
    return stamped(home() / "artifacts" / name, key, lambda path: nxd_infer(*arguments, "--out", path, root=root))
