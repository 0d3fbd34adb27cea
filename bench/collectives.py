"""Measure collectives between two ranks on one host: shared memory against gloo, in the same processes, interleaved."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import report
from bench.options import Options, home
from bench.process_groups import Group
from bench.stats import ratios, summary

SIZES = (2 << 10, 32 << 10, 512 << 10, 2 << 20)
DEGREE = 2
CALLS = 60
SECONDS = 300.0


def run(options: Options) -> None:
    from nxd_infer.comm.shm import create_segment

    segment = create_segment(DEGREE)
    with tempfile.TemporaryDirectory(prefix="nxd-bench-") as folder, contextlib.ExitStack() as stack:
        out = Path(folder) / "figures.json"
        for rank in range(DEGREE):
            order = f"import bench.collectives as b; b.rank({rank}, {segment}, {folder!r}, {options.rounds})"
            log = home() / "logs" / f"collectives-{rank}.log"
            group = Group([sys.executable, "-c", order], log, env={**os.environ, "OMP_NUM_THREADS": "1"}, fds=[segment])
            stack.enter_context(group)
            last = group
        os.close(segment)
        try:
            status = last.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            status = f"none after {SECONDS:.0f} s"
        if status != 0 or not out.is_file():
            raise SystemExit(f"a rank ended with status {status}:\n{last.tail()}")
        figures = json.loads(out.read_text())
    rows = [
        (name, summary(found["shm"]).text(1e6), summary(found["gloo"]).text(1e6), _ratio(found))
        for name, found in figures.items()
    ]
    report.write(
        *("collectives", f"Collectives of {DEGREE} ranks, microseconds", _columns(), rows, figures),
        settings=options.settings(),
    )


def _columns() -> tuple[str, ...]:
    return ("medians of a round", "shared memory", "gloo", "gloo / shared memory")


def _ratio(found: dict[str, list[float]]) -> str:
    return summary(ratios(found["gloo"], found["shm"])).text()


def rank(rank: int, segment: int, folder: str, rounds: int) -> None:
    """Run one rank: every operation and size over both transports, ``rounds`` times; the last writes the figures."""
    import torch
    import torch.distributed as dist

    from nxd_infer import native
    from nxd_infer.comm.shm import ShmCollectives
    from nxd_infer.context import make_context

    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=DEGREE,
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    context = make_context(DEGREE, rank, tp=DEGREE, collectives="shm")
    shm = ShmCollectives(native.load(), context, {"tp": segment}, timeout=SECONDS)
    figures: dict[str, dict[str, list[float]]] = {}
    for size in SIZES:
        x = torch.zeros(size // 2, dtype=torch.bfloat16)
        parts = [torch.empty_like(x) for _ in range(DEGREE)]
        work: dict[str, dict[str, Callable[[], Any]]] = {
            "all_reduce": {"shm": lambda x=x: shm.all_reduce(x, "tp"), "gloo": lambda x=x: dist.all_reduce(x)},
            "all_gather": {
                "shm": lambda x=x: shm.all_gather(x, "tp", 0),
                "gloo": lambda x=x, parts=parts: dist.all_gather(parts, x),
            },
        }
        for name, transports in work.items():
            found = figures[f"{name}, {size >> 10} KiB"] = {"shm": [], "gloo": []}
            for _ in range(rounds):
                for transport, call in transports.items():
                    shm.barrier("tp")
                    found[transport].append(_median(call))
    if rank == DEGREE - 1:
        (Path(folder) / "figures.json").write_text(json.dumps(figures))
    shm.close()
    dist.destroy_process_group()


def _median(call: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return summary(seconds[CALLS // 10 :]).median
