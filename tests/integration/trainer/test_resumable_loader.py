"""The position in the data: the very next batch after resuming, at the same and at another degree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.errors import CheckpointError
from nxd_infer.trainer import ResumableLoader, load_checkpoint, save_checkpoint
from tests.support.ranks import run_ranks
from tests.support.trainer.jobs import training
from tests.support.trainer.models import Numbers


class Dropped(nn.Module):
    """Learns with dropout, so that every step draws random numbers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layers(x) - x).square().mean()


Job = tuple[Any, Any, ResumableLoader]


def job(batch_size: int, seed: int, num_workers: int = 0) -> Job:
    model, optimizer = training(Dropped, seed=seed, optimizer_config={"zero_one_enabled": True})
    torch.manual_seed(100 + seed + current_context().rank)
    return model, optimizer, ResumableLoader(Numbers(), batch_size, shuffle=True, seed=3, num_workers=num_workers)


def train(parts: Job, epochs: int, root: str = "", save_at: int = -1) -> list[tuple[int, list[int], float]]:
    """Train to the end of the last epoch; the epoch, this rank's samples and its loss of every step."""
    model, optimizer, loader = parts
    done = []
    for epoch in range(loader.epoch, epochs):
        for batch in loader:
            loss = model.run_train(x=batch["x"])
            optimizer.step()
            optimizer.zero_grad()
            done.append((epoch, batch["index"].tolist(), float(loss)))
            if len(done) == save_at:
                save_checkpoint(root, "middle", model, optimizer, dataloader=loader, user_content=len(done))
    return done


def stopped_and_resumed(root: str, num_workers: int) -> tuple[list, list]:
    whole = train(job(2, 0, num_workers), 2, root, save_at=7)
    again = job(2, 1, num_workers)
    assert load_checkpoint(root, None, *again[:2], dataloader=again[2]) == 7
    return whole, train(again, 2)


def resumed(root: str, batch_size: int) -> list:
    parts = job(batch_size, 2)
    load_checkpoint(root, None, *parts[:2], dataloader=parts[2])
    return train(parts, 2)


def test_the_data_go_on_where_they_were(tmp_path: Path):
    """Saved in the second epoch at dp 2: bit by bit at dp 2, dropout included; the same samples a step at dp 1."""
    ranks = run_ranks(stopped_and_resumed, 2, str(tmp_path), 0, tp=1)
    for whole, again in ranks:
        assert len(whole) == 10 and again == whole[7:]
    steps = list(zip(*(whole for whole, _ in ranks), strict=True))
    for epoch in (0, 1):
        samples = [index for first, second in steps if first[0] == epoch for index in first[1] + second[1]]
        assert len(set(samples)) == 20  # the two that fill no step are left out
    (alone,) = run_ranks(resumed, 1, str(tmp_path), 4)
    assert [(epoch, samples) for epoch, samples, _ in alone] == [
        (first[0], first[1] + second[1]) for first, second in steps[7:]
    ]


def test_what_workers_fetched_ahead_is_not_lost(tmp_path: Path):
    whole, again = stopped_and_resumed(str(tmp_path), num_workers=2)
    assert len(whole) == 22 and again == whole[7:]


def test_each_rank_of_another_loader_gets_its_own(tmp_path: Path):
    """Anything with ``state_dict()`` will do; positions that differ between ranks go on at their degrees only."""
    for found in run_ranks(positions_of_ranks, 2, str(tmp_path), tp=1):
        assert found
    with pytest.raises(
        CheckpointError, match=r"another position in the data for each rank, .*'dp': 2.*ResumableLoader"
    ):
        load_checkpoint(tmp_path, "own", dataloader=Position())
    with pytest.raises(CheckpointError, match=r"no position in the data; it was saved without dataloader="):
        load_checkpoint(tmp_path, "none", dataloader=Position())
    same = Position()
    load_checkpoint(tmp_path, "same", dataloader=same)
    assert same.state == {"at": 5, "seen": [1, 2]}


class Position:
    state: Any = None

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def positions_of_ranks(root: str) -> bool:
    mine, empty = Position(), Position()
    mine.state = {"at": current_context().rank, "queue": torch.arange(3) + current_context().rank}
    save_checkpoint(root, "own", dataloader=mine)
    save_checkpoint(root, "none")
    load_checkpoint(root, "own", dataloader=empty)
    same = empty.state["at"] == mine.state["at"] and torch.equal(empty.state["queue"], mine.state["queue"])
    mine.state = {"at": 5, "seen": [1, 2]}
    save_checkpoint(root, "same", dataloader=mine)
    return same
