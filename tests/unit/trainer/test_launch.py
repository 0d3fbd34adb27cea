"""A process that a launcher started trains as one of several or not at all; loaders and comparisons in one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer.context import make_context, use_context
from nxd_infer.distributed import ParallelizersManager
from nxd_infer.errors import CheckpointError, NotInitializedError, NxdError, ParallelConfigError
from nxd_infer.modules.lora import LoraConfig, LoRAModel
from nxd_infer.optimizer import NxDOptimizer
from nxd_infer.pipeline import NxDPPModel
from nxd_infer.testing import Training, assert_parallel_equivalent, compare_with, train_single
from nxd_infer.trainer import ResumableLoader
from tests.support.trainer.models import Numbers, mlp, vectors


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WORLD_SIZE": "2"}, "the environment has no RANK, MASTER_ADDR, MASTER_PORT: start"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number of at least 1, got 'two'"),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "::1", "MASTER_PORT": "1", "PJRT_DEVICE": "NEURON"},
            "PJRT_DEVICE=NEURON: training over XLA devices is not supported yet",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "first", "MASTER_ADDR": "::1", "MASTER_PORT": "1"},
            "RANK must be a whole number of at least 0, got 'first'",
        ),
        (  # alone on a machine that says it has GPUs, which it would not train on
            {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "::1", "MASTER_PORT": "1", "LOCAL_RANK": "0"},
            r"LOCAL_RANK=0, but this machine has 0 GPU\(s\)",
        ),
    ],
)
def test_a_launched_process_never_goes_on_alone(environment: dict[str, str], said: str, monkeypatch, tmp_path: Path):
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT", "PJRT_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    config = nxd.neuronx_distributed_config()
    adapted = LoRAModel(nn.Sequential(nn.Linear(2, 2)), LoraConfig(target_modules=["0"]))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "LOCAL_RANK" in environment)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    param = nn.Parameter(torch.ones(2))
    for action in (
        nxd.neuronx_distributed_config,
        nxd.parallel_state.initialize_model_parallel,
        lambda: nxd.initialize_parallel_model(config, nn.Linear, 2, 2),
    ):
        with pytest.raises(NxdError, match=said):
            action()
    if environment["WORLD_SIZE"] == "2":
        for what, action in (
            ("NxDOptimizer", lambda: NxDOptimizer([param], torch.optim.SGD)),
            ("NxDPPModel", lambda: NxDPPModel(nn.Linear(2, 2))),
            ("parallelize", lambda: ParallelizersManager.parallelizer_for_model("llama").parallelize(nn.Linear(2, 2))),
            ("clip_grad_norm", lambda: nxd.parallel_layers.clip_grad_norm([param], 1.0)),
            ("save_checkpoint", lambda: nxd.save_checkpoint(tmp_path, "first", nn.Linear(2, 2))),
            ("save", lambda: nxd.parallel_layers.save({"step": 1}, tmp_path / "one")),
            ("save_adapter", lambda: adapted.save_adapter(tmp_path / "adapter")),
        ):
            with pytest.raises(NotInitializedError, match=f"{what}: this process is one of 2, but model parallelism"):
                action()
    assert not list(tmp_path.iterdir()) and not torch.distributed.is_initialized()


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
    for bad in ({**state, "samples": -1}, {"epoch": 1}, None):
        with pytest.raises(CheckpointError, match="is not a position of a ResumableLoader"):
            ResumableLoader(Numbers(), 2, seed=1).load_state_dict(bad)


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


class Product(nn.Module):
    """Its gradient is ``scale`` times its input."""

    def __init__(self, size: int, scale: float) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(size)), scale

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum() * self.scale


def test_the_norm_of_a_large_parameter():
    """Right training was told to be wrong: PyTorch's norm is wrong by 3e-5 here, and by less for each rank's part."""
    x = torch.randn(2**21)
    plain = train_single(partial(Product, 2**21, 1.0), (x,), Training(steps=1))
    assert plain.norms == [pytest.approx(float(x.double().norm()), rel=5e-6)]


def test_a_model_that_learns_nothing():
    idle, batch = partial(Product, 2, 0.0), (torch.ones(2),)
    assert compare_with(train_single(idle, batch, Training(steps=2)), idle, batch, Training(steps=2)) == []


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (mlp, {"pp": 2, "accumulate": 2}, "accumulate=2: a pipeline accumulates over its microbatches"),
        (mlp, {"dp": 3}, "the batch's 'x' has 4 rows, which do not divide into 3 equal parts"),
        (lambda: mlp(), {}, r"cannot import .*<lambda>.*: pass a function defined at the top"),
    ],
)
def test_what_does_not_fit(model: Any, options: dict[str, Any], message: str):
    with pytest.raises(ParallelConfigError, match=message):
        assert_parallel_equivalent(model, vectors(), **options)
