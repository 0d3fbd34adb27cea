"""A stage is built with the values that it has in the whole model, and the others' parameters are never there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nxd_infer.context import make_context
from nxd_infer.pipeline.build import _FreeingOthers, _Needed, build_stage
from nxd_infer.pipeline.options import PipelineOptions
from nxd_models import registry
from tests.support.pipeline.models import decoder, encoder
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


def test_the_memory_of_others_is_given_back():
    """64 KiB that another rank owns, until the next of them is written."""
    freeing = _FreeingOthers()
    first, second, own = (torch.ones(128, 128) for _ in range(3))
    freeing.add(first)
    assert first.all()
    freeing.add(second)
    assert not first[64].any() and second.all()
    with freeing:
        first.fill_(2)
        with pytest.raises(_Needed):
            own.copy_(second * 2)
    assert first.all() and not second[64].any() and own.all()
