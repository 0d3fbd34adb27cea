"""The position in the data: the very next batch after resuming, at the same and at another degree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxd_infer.context import current_context, make_context, use_context
from nxd_infer.errors import CheckpointError, ParallelConfigError
from nxd_infer.trainer import ResumableLoader, load_checkpoint, save_checkpoint
from tests.support.ranks import run_ranks
from tests.support.trainer.jobs import training


class Numbers(torch.utils.data.Dataset):
    """Sample i is i and a vector made of it."""

    def __init__(self, count: int = 22):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"index": torch.tensor(index), "x": torch.full((6,), index / 7.0).sin()}


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


def test_an_epoch_begun_anew():
    """Breaking out of an epoch and iterating again goes on; the end of an epoch begins the next one."""
    loader = ResumableLoader(Numbers(6), 2, shuffle=True, seed=1)
    assert len(loader) == 3
    first = next(iter(loader))["index"].tolist()
    rest = [index for batch in loader for index in batch["index"].tolist()]
    assert sorted(first + rest) == list(range(6)) and loader.state_dict()["samples"] == 0 and loader.epoch == 1
    second = [index for batch in loader for index in batch["index"].tolist()]
    assert sorted(second) == list(range(6)) and second != first + rest
    before = torch.get_rng_state()
    list(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_a_loader_refuses():
    for size in (0, True):
        with pytest.raises(ParallelConfigError, match=f"batch_size must be a whole number of at least 1, got {size}"):
            ResumableLoader(Numbers(), size)
    with pytest.raises(ParallelConfigError, match=r"\['drop_last', 'sampler'\] cannot be passed"):
        ResumableLoader(Numbers(), 1, sampler=[1], drop_last=True)
    with (
        use_context(make_context(4, 0)),
        pytest.raises(ParallelConfigError, match="22 samples does not fill a step of 24: batch_size 6 on 4"),
    ):
        ResumableLoader(Numbers(), 6)
    state = ResumableLoader(Numbers(), 2, seed=1).state_dict()
    for other, key in ((ResumableLoader(Numbers(21), 2, seed=1), "length"), (ResumableLoader(Numbers(), 2), "seed")):
        with pytest.raises(CheckpointError, match=f"from a loader with {key}"):
            other.load_state_dict(state)
    with pytest.raises(CheckpointError, match="from a loader with shuffle False, but this one has True"):
        ResumableLoader(Numbers(), 2, seed=1, shuffle=True).load_state_dict(state)


def test_an_iterator_that_another_has_replaced_moves_nothing():
    loader = ResumableLoader(Numbers(), 3)
    old = iter(loader)
    next(old)
    assert len(list(loader)) == 6
    assert next(old, None) is None
    assert (loader.epoch, loader.state_dict()["samples"]) == (1, 0)
    old = iter(loader)
    next(old)
    loader.load_state_dict({**loader.state_dict(), "samples": 6})
    assert next(old, None) is None
    assert (loader.epoch, loader.state_dict()["samples"]) == (1, 6)
