"""Models of the toy artifact with ranks of their own."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from nxd_infer.runtime.model import TensorParallelModel
from nxd_infer.runtime.save_load import parallel_model_load
from tests import toy_artifacts as toy
from tests.processes import wait_until

TIMEOUT = 3.0
"""Of calls whose rank is stopped, and never goes on."""
LIMIT = 60.0
"""Of all others: it guards against hanging, however busy the machine is."""

X = torch.zeros(1, 1, toy.HIDDEN)


def started(path: Path, call_timeout: float = LIMIT, **options) -> TensorParallelModel:
    return parallel_model_load(path, call_timeout=call_timeout, start_timeout=600, **options).start()


def until_busy(model: TensorParallelModel, rank: int) -> None:
    """Until ``rank`` is in the middle of a step."""
    wait_until(lambda: model.health()[rank].busy_seconds > 0)


def pids_of(model: TensorParallelModel) -> list[int]:
    return [rank.pid for rank in model.health() if rank.pid is not None]


def call_in_thread(model: TensorParallelModel, *inputs: torch.Tensor) -> tuple[threading.Thread, list]:
    result: list = []

    def run() -> None:
        try:
            result.append(model(*inputs))
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, result
