"""Models of the toy artifact with ranks of their own."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch

from nxd_infer.trace.artifact import parallel_model_load
from nxd_infer.trace.model import TensorParallelModel
from tests.trace import toy

TIMEOUT = 3.0


X = torch.zeros(1, 1, toy.HIDDEN)


def started(path: Path, **options) -> TensorParallelModel:
    return parallel_model_load(path, call_timeout=TIMEOUT, start_timeout=120, **options).start()


def pids_of(model: TensorParallelModel) -> list[int]:
    return [rank.pid for rank in model.health() if rank.pid is not None]


def call_in_thread(model: TensorParallelModel, *inputs: torch.Tensor) -> tuple[threading.Thread, list]:
    result: list = []

    def run() -> None:
        begin = time.monotonic()
        try:
            result.append(model(*inputs))
        except BaseException as error:
            result.append(error)
        result.append(time.monotonic() - begin)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, result
