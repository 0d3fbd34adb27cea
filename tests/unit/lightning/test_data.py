"""Which rows each rank sees, in which order; and what a module, a strategy and a Trainer refuse."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, WeightedRandomSampler

import nxd_infer as nxd
from nxd_infer.context import Axis, make_context
from nxd_infer.errors import CheckpointError, NotInitializedError, NxdError, ParallelConfigError
from nxd_infer.lightning import NeuronLTModule, NeuronXLAStrategy
from nxd_infer.lightning.data import share_of
from nxd_infer.lightning.strategy import RankLauncher
from tests.support.lightning.jobs import Rows, one, small, trainer_of
from tests.support.trainer.models import llama


def axis(rank: int, degree: int) -> Axis:
    return make_context(degree, rank, tp=1).dp


def batches(loader: DataLoader, degree: int, epoch: int = 0, splits: bool = True, items: int = 0) -> list[Any]:
    """For each data-parallel rank its batches of an epoch, from a position on."""
    found = []
    for rank in range(degree):
        mine = share_of(loader, axis(rank, degree), splits)
        mine.sampler.set_epoch(epoch)
        if items:
            mine.load_state_dict({"epoch": epoch, "items": items})
        found.append([batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in mine])
    return found


def numbers(count: int) -> list[int]:
    return list(range(count))


def test_a_step_takes_consecutive_rows_and_each_rank_its_part():
    assert batches(DataLoader(numbers(8), 2), 2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert batches(DataLoader(numbers(8), 4), 1) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]


def test_ranks_have_as_many_batches_of_one_size():
    """The last step takes first rows again, or is dropped if it was asked for."""
    assert batches(DataLoader(numbers(7), 2), 2) == [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]
    assert batches(DataLoader(numbers(5), 2), 2) == [[[0, 1], [4]], [[2, 3], [0]]]
    assert batches(DataLoader(numbers(7), 2, drop_last=True), 2) == [[[0, 1]], [[2, 3]]]
    assert batches(DataLoader(numbers(1), 2), 3) == [[[0]], [[0]], [[0]]]
    for loader in (DataLoader(numbers(7), 2), DataLoader(numbers(5), 2), DataLoader(numbers(7), 2, drop_last=True)):
        for rank in range(2):
            mine = share_of(loader, axis(rank, 2), True)
            assert len(mine) == len(list(mine))


def test_shuffled_rows_are_all_rows_in_one_order_for_all_ranks_and_another_in_each_epoch():
    torch.manual_seed(1)
    first, other = (batches(DataLoader(numbers(12), 2, shuffle=True), 2, epoch) for epoch in (0, 1))
    # The order is not the global generator's, which differs between ranks, and does not draw from it.
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert batches(DataLoader(numbers(12), 2, shuffle=True), 2) == first != other
    assert torch.equal(torch.get_rng_state(), state)
    for found in (first, other):
        assert sorted(row for rank in found for batch in rank for row in batch) == numbers(12)
    whole = batches(DataLoader(numbers(12), 4, shuffle=True), 1)[0]
    assert [mine + theirs for mine, theirs in zip(*first, strict=True)] == whole
    seeded = DataLoader(numbers(12), 2, shuffle=True, generator=torch.Generator().manual_seed(9))
    assert batches(seeded, 2) != first


def test_the_seed_of_the_trainer_is_the_orders(monkeypatch):
    first = batches(DataLoader(numbers(12), 2, shuffle=True), 2)
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    assert batches(DataLoader(numbers(12), 2, shuffle=True), 2) != first


def test_an_epoch_goes_on_at_any_position_and_degree():
    loader = DataLoader(numbers(12), 2, shuffle=True)
    whole = batches(DataLoader(numbers(12), 2, shuffle=True), 2, epoch=3)
    assert batches(loader, 2, epoch=3, items=4) == [rank[1:] for rank in whole]
    alone = batches(DataLoader(numbers(12), 4, shuffle=True), 1, epoch=3, items=4)[0]
    assert alone == [mine + theirs for mine, theirs in zip(*(rank[1:] for rank in whole), strict=True)]
    assert batches(loader, 2, epoch=3, items=12) == [[], []]


def test_a_position_counts_begun_steps_and_holds_for_its_epoch_only():
    mine = share_of(DataLoader(numbers(12), 2), axis(1, 2), True)
    mine.load_state_dict({"epoch": 1, "items": 4})
    assert [batch.tolist() for batch in mine] == [[2, 3], [6, 7], [10, 11]]
    mine.sampler.set_epoch(1)
    for _ in zip(range(2), mine, strict=False):
        mine.sampler.begin_step()
    assert mine.state_dict() == {"epoch": 1, "items": 8}


def test_samplers_of_the_user():
    weighted = WeightedRandomSampler([0.0, 1.0, 1.0, 1.0], 8)
    both = batches(DataLoader(numbers(4), 2, sampler=weighted), 2)
    assert both == batches(DataLoader(numbers(4), 2, sampler=weighted), 2)
    assert {row for rank in both for batch in rank for row in batch} <= {1, 2, 3}
    in_pairs = [[0, 1, 2], [3], [4, 5], [6, 7], [8]]
    pairs = DataLoader(numbers(9), batch_sampler=in_pairs)
    assert batches(pairs, 2) == [[[0, 1, 2], [4, 5], [8]], [[3], [6, 7], [0, 1, 2]]]
    assert batches(DataLoader(numbers(4), batch_size=None), 2) == [[0, 2], [1, 3]]


def test_what_is_split_already_is_left():
    of_this_rank = DistributedSampler(numbers(8), num_replicas=2, rank=1, shuffle=False)
    mine = share_of(DataLoader(numbers(8), 2, sampler=of_this_rank), axis(1, 2), True)
    assert [batch.tolist() for batch in mine] == [[1, 3], [5, 7]]
    assert batches(DataLoader(numbers(4), 2), 2, splits=False) == [[[0, 1], [2, 3]]] * 2


def test_a_sampler_over_other_ranks_is_refused():
    """That of torch's defaults, on four ranks which are two pairs."""
    of_all = DistributedSampler(numbers(8), num_replicas=4, rank=3)
    with pytest.raises(
        ParallelConfigError, match="num_replicas=4, rank=3 on data-parallel rank 1 of 2: ranks that share"
    ):
        share_of(DataLoader(numbers(8), 2, sampler=of_all), axis(1, 2), True)


def test_an_iterable_dataset_can_only_split_itself():
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(range(3))

    loader = DataLoader(Stream(), 1)
    with pytest.warns(UserWarning, match="every data-parallel rank reads all of this Stream"):
        assert share_of(loader, axis(0, 2), True) is loader
    assert share_of(loader, axis(0, 1), True) is loader


def test_the_class_cannot_build_its_model_from_a_checkpoint():
    with pytest.raises(CheckpointError, match="build the module and pass ckpt_path="):
        NeuronLTModule.load_from_checkpoint("last.ckpt")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"manual_opt": False}, "manual_opt=False is not supported"),
        ({"grad_accum_steps": 0}, "grad_accum_steps must be a whole number of at least 1, got 0"),
        ({"grad_accum_steps": True}, "grad_accum_steps must be a whole number of at least 1, got True"),
        ({"opt_args": range(20)}, "opt_args has 20 values, but SGD takes"),
        ({"grad_accum_steps": 2, "pp": 2}, "grad_accum_steps=2 with a pipeline: pass batches 2 times as large"),
    ],
)
def test_arguments_that_are_refused(options: dict[str, Any], said: str):
    config = {"pipeline_parallel_size": options.pop("pp", 1)}
    with pytest.raises(ParallelConfigError, match=said):
        NeuronLTModule(llama, config, torch.optim.SGD, None, **options)._named_opt_args()


def test_strategies_that_are_refused(tmp_path: Path):
    with pytest.raises(ParallelConfigError, match="tensor_parallel_size=4, but nxd_config has 2: leave it out"):
        NeuronXLAStrategy({"tensor_parallel_size": 2}, tensor_parallel_size=4)
    assert NeuronXLAStrategy(None, 2, 1, False).nxd_config.tensor_parallel_size == 2
    rows = DataLoader(Rows(), 4)
    with pytest.raises(NxdError, match="tensor_parallel_size=2 needs 2 processes"):
        one(NeuronXLAStrategy({"tensor_parallel_size": 2})).fit(small(), rows)
    with pytest.raises(ParallelConfigError, match="NeuronLTModule cannot train with SingleDeviceStrategy"):
        trainer_of("auto").fit(small(), rows)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ParallelConfigError, match="AsyncCheckpointIO cannot save ranks that share a model"):
        one(NeuronXLAStrategy(checkpoint_io=AsyncCheckpointIO())).fit(small(), rows)
    with pytest.raises(CheckpointError, match="nowhere is not a checkpoint of a Trainer"):
        one().fit(small(), rows, ckpt_path=tmp_path / "nowhere")
    nxd.save_checkpoint(tmp_path, "plain", llama(), user_content={"step": 1})
    with pytest.raises(CheckpointError, match="plain was not saved by a Trainer: load it with"):
        one().validate(small(), rows, ckpt_path=tmp_path / "plain")


def test_xla_devices_are_refused(monkeypatch):
    """By what the Trainer was given, and by what torch_xla was told: a single rank would train on the CPU silently."""
    with pytest.raises(ParallelConfigError, match=r"does not train on xla:0 .*: leave accelerator out or pass"):
        one(NeuronXLAStrategy(parallel_devices=[torch.device("xla", 0)]))
    monkeypatch.setenv("PJRT_DEVICE", "NEURON")
    with pytest.raises(NotInitializedError, match="PJRT_DEVICE=NEURON: training over XLA devices is not supported"):
        one().fit(small(), DataLoader(Rows(), 4))


def test_an_interactive_session_has_no_program_to_start(monkeypatch):
    monkeypatch.setattr(sys, "argv", [""])
    with pytest.raises(ParallelConfigError, match="devices=2 runs this program 2 times, but an interactive session"):
        RankLauncher(LightningEnvironment(), 2, 1, variables=lambda number: {}).launch(print)
