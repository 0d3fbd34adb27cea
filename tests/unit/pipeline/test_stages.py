"""Stages in one process: how they are built and called, weight gradients that wait, and a checkpoint's weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nxd_infer.checkpoint.stages_by_name import stages_of
from nxd_infer.context import make_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.pipeline import NxDPPModel
from nxd_infer.pipeline.build import build_stage
from nxd_infer.pipeline.options import PipelineOptions
from nxd_infer.pipeline.stage import StandIn
from nxd_models import registry
from tests.support.pipeline.models import SPEC, Residual, data, decoder, encoder
from tests.support.tiny_models import write_tiny

OPTIONS = PipelineOptions({"auto_partition": True})


class Restless(nn.Module):
    """Draws in every way, replaces what it has registered, and reads its own weights."""

    def __init__(self, reads: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.extra = nn.Parameter(torch.randn(7))
        for layer in self.layers:
            nn.init.trunc_normal_(layer.weight, std=0.3)
            nn.init.orthogonal_(self.extra.data.view(7, 1))
            layer.bias = nn.Parameter(torch.rand(5))
            layer.bias.data.exponential_().mul_(float(self.layers[0].weight[0, 0].detach()) if reads else 2)
        self.layers[3].weight = self.layers[0].weight
        self.register_buffer("noise", torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum() + self.extra.sum()


def check(make: Callable[[], nn.Module], ranks: int) -> None:
    torch.manual_seed(5)
    wanted = make().state_dict()
    after = torch.get_rng_state()
    held: set[str] = set()
    for rank in range(ranks):
        calls = 0

        def counted() -> nn.Module:
            nonlocal calls
            calls += 1
            return make()

        torch.manual_seed(5)
        model, _ = build_stage(counted, OPTIONS, make_context(ranks, rank, pp=ranks).pp)
        assert calls == 2, "not built as a whole"
        assert torch.equal(torch.get_rng_state(), after)
        own = model.state_dict()
        assert own and all(torch.equal(tensor, wanted[name]) for name, tensor in own.items())
        held |= own.keys()
    assert held >= wanted.keys() - {"lm_head.weight", "layers.3.weight"}, "all but tied ones"


@pytest.mark.parametrize("make", [Restless, partial(decoder, "tied"), encoder])
def test_as_in_the_whole_model(make: Callable[[], nn.Module]):
    check(make, 4)


def test_from_files(tmp_path: Path):
    check(partial(registry.load_model, write_tiny("llama", tmp_path / "llama"), dtype=torch.float32), 2)


class Copied(Restless):
    """All layers are copies of the first, by an operation that needs its values on other ranks."""

    def __init__(self):
        super().__init__()
        for layer in self.layers[1:]:
            layer.load_state_dict(self.layers[0].state_dict())


class Reading(Restless):
    """Is not built on the meta device."""

    def __init__(self):
        super().__init__(True)


class Parts(nn.Module):
    """All weights are parts of one tensor, so they have one memory."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))
        for layer, part in zip(self.layers, torch.randn(4, 128, 128), strict=True):
            layer.weight = nn.Parameter(part)
        self.last = nn.Linear(128, 3)


@pytest.mark.parametrize("make", [Copied, Parts, Reading])
def test_what_needs_other_ranks_values_is_built_whole(make: Callable[[], nn.Module]):
    torch.manual_seed(5)
    wanted = make().state_dict()
    for rank in range(2):
        torch.manual_seed(5)
        model, _ = build_stage(make, OPTIONS, make_context(2, rank, pp=2).pp)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


def test_without_other_stages():
    """At pp 1 it runs the same microbatches in this process, and is called like the module."""
    torch.manual_seed(5)
    whole = Residual()
    torch.manual_seed(5)
    model = NxDPPModel(Residual(), num_microbatches=4, output_loss_value_spec=SPEC)
    loss = whole(**data())["the_loss"]
    loss.backward()
    torch.testing.assert_close(model.run_train(**data()), loss.detach())
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad)
    torch.testing.assert_close(model.run_eval(**data()), loss.detach())
    torch.testing.assert_close(model(**data())["the_loss"], loss)
    assert model.bubble is not None and 0 <= model.bubble < 1


def test_a_module_of_another_rank_is_moved_by_name_only():
    """It stays without memory, and takes the dtype."""
    hidden = nn.Linear(2, 2, device="meta")
    model = nn.Sequential(StandIn(hidden), nn.Linear(2, 2)).to("cpu", torch.bfloat16)
    assert hidden.weight.is_meta and hidden.weight.dtype == model[1].weight.dtype == torch.bfloat16
    assert model.float().to("cpu")[1].weight.device.type == "cpu" and hidden.weight.dtype == torch.float32


def test_one_number_or_several():
    with pytest.raises(ParallelConfigError, match="gives one number, so return_mb_loss must be False"):
        PipelineOptions({"return_mb_loss": True, "broadcast_and_average_loss": True})


def test_what_is_told_without_ranks():
    def broken() -> nn.Module:
        raise ZeroDivisionError("a mistake of the user's")

    with pytest.raises(ParallelConfigError, match="Linear has no module with weights inside"):
        NxDPPModel(nn.Linear(4, 4))
    pp, options = make_context(8, 0, pp=8).pp, PipelineOptions({"auto_partition": True})
    with pytest.raises(ZeroDivisionError, match="a mistake of the user's"):
        build_stage(broken, options, pp)
    with pytest.raises(ParallelConfigError, match="8 pipeline stages, but the model has 4 transformer layers"):
        build_stage(Residual, options, pp)


WEIGHTS = {
    "embed.weight": 100,
    "layers.0.a": 8,
    "layers.2.a": 8,
    "head.weight": 12,
    "layers.1.a": 8,
    "layers.1.norm": 0,
    "layers.10.a": 8,
}


def test_stages_by_name():
    assert stages_of(WEIGHTS, 2) == {
        "embed.weight": 0,
        "layers.0.a": 0,
        "layers.1.a": 0,
        "layers.1.norm": 0,
        "layers.2.a": 0,
        "layers.10.a": 1,
        "head.weight": 1,
    }
    assert stages_of(WEIGHTS, 3, ["layers.0", "layers.1"])["layers.10.a"] == 2
    assert set(stages_of(WEIGHTS, 1).values()) == {0}
    wrong = {
        "need 1 cuts, got 2": (2, ["layers.0", "layers.1"]),
        "has no layer 'layers.3'; did you mean": (2, ["layers.3"]),
        "are not in the order of the layers": (3, ["layers.1", "layers.0"]),
        "at most 5 stages": (6, None),
    }
    for message, (stages, cuts) in wrong.items():
        with pytest.raises(ParallelConfigError, match=message):
            stages_of(WEIGHTS, stages, cuts)
