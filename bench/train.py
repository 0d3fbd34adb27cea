"""Measure training: a step at tp 2 against DTensor and one process, ZeRO-1 against FSDP2 and DDP, saves, activations.

All train the same Llama on the same batch with the same fused AdamW, in the same two processes of one thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from bench import report
from bench.compiled import program
from bench.options import Options
from bench.stats import Verdict, ratios, summary
from bench.two_ranks import RANKS, SECONDS, figures_of

TOKENS = 4 * 256
"""Tokens of a step, over all ranks."""
MEMORY_LENGTH = 512


def run(options: Options) -> None:
    program("stream")  # compile before measuring
    figures = _ranks(options)
    figures["memory"] = {mode: _memory(mode, options) for mode in ("none", "full")}
    seconds, save, memory = figures["seconds"], figures["save"], figures["memory"]
    rows = [
        (name, summary(found).text(1e3, 0), summary([TOKENS / value for value in found]).text(1, 0))
        for name, found in seconds.items()
    ]
    rows += [(f"{name} save blocks training", summary(found).text(1e3, 0), "") for name, found in save.items()]
    rows.append(("read bandwidth, GB/s", summary(figures["bandwidth"]).text(1e-9), ""))
    rows += [(f"activations, checkpointing {mode}, MiB", f"{memory[mode]['bytes'] / 2**20:.0f}", "") for mode in memory]
    report.write(
        *("train", "Training", ("median (range)", "milliseconds", "tokens/s"), rows, figures),
        verdicts=_verdicts(figures),
        settings=options.settings(),
    )


def _verdicts(figures: dict[str, Any]) -> list[Verdict]:
    seconds, save, state, memory = (figures[name] for name in ("seconds", "save", "state", "memory"))

    def against(row: str, ours: str, other: str, must: float, aim: float) -> Verdict:
        return Verdict(row, summary(ratios(seconds[ours], seconds[other])), must, aim, "lower")

    sharper = summary(ratios(seconds["one process"], seconds["tp 2"]))
    saving = summary(ratios(save["async"], save["sync"]))
    extra = state["most"] - state["whole"] / RANKS
    kept = memory["full"]["bytes"] / memory["none"]["bytes"]
    return [
        against("tp 2 step over DTensor's", "tp 2", "DTensor", 0.9, 0.9),
        Verdict("tp 2 against one process of one thread", sharper, 1.5, 1.5),
        against("sequence parallel over plain tp 2", "tp 2, sequence parallel", "tp 2", 1.05, 1.05),
        against("ZeRO-1 step over FSDP2's", "ZeRO-1", "FSDP2", 1.0, 1.0),
        against("ZeRO-1 step over DDP's", "ZeRO-1", "DDP", 1.15, 1.05),
        Verdict(
            "ZeRO-1 state beyond 1/dp",
            summary([extra]),
            state["padding"],
            state["padding"],
            "lower",
            "elements",
        ),
        Verdict("async save blocks, over sync", saving, 0.25, 0.25, "lower"),
        Verdict("activation memory, full over none", summary([kept]), 0.5, 0.5, "lower"),
    ]


def _ranks(options: Options) -> dict[str, Any]:
    """Run the two ranks and return their figures."""
    return figures_of("bench.train_ranks", options)


def _memory(mode: str, options: Options) -> dict[str, Any]:
    """Return the peak bytes that a step adds with this activation checkpointing."""
    layers, hidden = (4, 256) if options.quick else (16, 1024)
    done = subprocess.run(
        [sys.executable, "-m", "bench.train_memory", mode, str(layers), str(hidden), str(MEMORY_LENGTH)],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if done.returncode:
        raise SystemExit(f"measuring memory failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)
