"""Run a function on several ranks that share one GPU over NCCL: ``call(jobs.function, world_size, *arguments)``.

NCCL refuses two ranks on one GPU, unless it takes them for ranks on two machines: each is told another host's name, and
they communicate over sockets of this one. Everything but the path of the bytes is as between GPUs.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nxd_infer.util.ports import free_port

ROOT = Path(__file__).parents[3]
LIMIT = 300
"""Seconds for all ranks of a call."""
ONE_GPU = {
    "CUDA_VISIBLE_DEVICES": (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0],
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
}


def place(rank: int, world_size: int, port: int, gpu: bool = True) -> dict[str, str]:
    """The environment of a rank that torchrun has started, alone on its machine."""
    launched = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    launched |= dict.fromkeys(("RANK", "GROUP_RANK"), str(rank)) | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    launched |= {"TORCHELASTIC_RUN_ID": "none", "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    device = {**ONE_GPU, "NCCL_HOSTID": f"machine{rank}"} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **launched, **device}


def launch(command: list[str], world_size: int, gpu: bool = True, cwd: Path = ROOT, fails: bool = False) -> list[str]:
    """What each rank of a command wrote. ``fails``: they may end with another status than 0."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="nxd-cuda-") as folder, contextlib.ExitStack() as stack:
        logs = [Path(folder, str(rank)) for rank in range(world_size)]
        ranks = []
        for rank, log in enumerate(logs):
            file, place_ = stack.enter_context(log.open("wb")), place(rank, world_size, port, gpu)
            ranks.append(subprocess.Popen(command, cwd=cwd, env=place_, stdout=file, stderr=subprocess.STDOUT))
            stack.callback(ranks[-1].wait)
            stack.callback(ranks[-1].kill)
        deadline = time.monotonic() + LIMIT
        for process in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        said = "\n".join(
            f"rank {rank} ended with {process.poll()}:\n{log.read_text()[-4000:]}"
            for rank, (process, log) in enumerate(zip(ranks, logs, strict=True))
        )
        ended = [process.poll() for process in ranks]
        assert None not in ended, f"ranks had not ended after {LIMIT} s\n{said}"
        assert fails or not any(ended), said
        return [log.read_text() for log in logs]


def call(function: Callable[..., Any], world_size: int, *arguments: Any, gpu: bool = True) -> list[Any]:
    """What a function of jobs.py returns on each rank, if JSON holds it. ``arguments`` are literals."""
    with tempfile.TemporaryDirectory(prefix="nxd-cuda-") as folder:
        command = [sys.executable, "-m", "tests.integration.cuda.ranks", function.__name__, repr(arguments), folder]
        launch(command, world_size, gpu)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world_size)]


def main(function: str, arguments: str, folder: str) -> None:
    from tests.integration.cuda import jobs

    result = getattr(jobs, function)(*ast.literal_eval(arguments))
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
