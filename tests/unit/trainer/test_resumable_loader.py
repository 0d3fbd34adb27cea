"""ResumableLoader in one process: epochs, iterators that were replaced, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from nxd_infer.context import make_context, use_context
from nxd_infer.errors import CheckpointError, ParallelConfigError
from nxd_infer.trainer import ResumableLoader
from tests.support.trainer.models import Numbers


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
