"""Ranks that take turns: never more of them at once than an option says."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import nxd_infer as nxd
from nxd_infer.comm.turns import in_turns
from nxd_infer.context import current_context
from tests.support.ranks import run_ranks

RANKS = 2


class Work:
    """Writes down when each rank begins and ends, with time in between for another one that may begin, too."""

    def __init__(self, log: Path):
        self._log = log

    def __call__(self) -> nn.Module:
        self._write(1)
        time.sleep(0.2)
        self._write(-1)
        return nn.Linear(2, 2)

    def _write(self, change: int) -> None:
        with self._log.open("a") as file:
            file.write(f"{change}\n")


def together(log: Path) -> tuple[int, int]:
    """Return the most ranks that worked at once, and how many worked."""
    changes = [int(line) for line in log.read_text().split()]
    return max(sum(changes[:end]) for end in range(len(changes) + 1)), changes.count(1)


def act(log: Path, at_a_time: int, options: dict[str, Any]) -> None:
    in_turns(current_context(), at_a_time, Work(log), **options)


@pytest.mark.parametrize("options", [{}, {"of_world": True}, {"of_host": True}], ids=["data", "world", "host"])
def test_one_at_a_time(tmp_path: Path, options: dict[str, Any]):
    run_ranks(act, RANKS, tmp_path / "log", 1, options, tp=1)
    assert together(tmp_path / "log") == (1, RANKS)


def build(log: Path, factor: int) -> None:
    config = nxd.neuronx_distributed_config(
        tensor_parallel_size=RANKS, model_init_config={"sequential_move_factor": factor}
    )
    nxd.initialize_parallel_model(config, Work(log))


def test_models_are_built_one_at_a_time(tmp_path: Path):
    """``sequential_move_factor`` of them at once."""
    run_ranks(build, RANKS, tmp_path / "log", 1)
    assert together(tmp_path / "log") == (1, RANKS)
