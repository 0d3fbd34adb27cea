"""Two stages of models with values and weights of several kinds: complex, of autocast, narrow and tied, frozen."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.optimizer import NxDOptimizer
from nxd_infer.pipeline import NxDPPModel
from tests.support.ranks import run_ranks

MICROBATCHES = 2


class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x * self.weight)


class Waves(nn.Module):
    """The first stage hands complex numbers to the second one."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), Spectrum(), nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        found = torch.fft.ifft(self.second(self.first(x)) * (1 + 2j))
        return F.cross_entropy(self.third(found.real * found.imag).float(), labels)


class Layers(nn.Module):
    """Under autocast, of float32 and of bfloat16 in turns."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.third(self.second(self.first(x))).float(), labels)


class Tied(nn.Module):
    """In bfloat16; the last stage borrows the head from the first one."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(11, 8, dtype=torch.bfloat16), nn.Linear(8, 8, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(8, dtype=torch.bfloat16)
        self.head = nn.Linear(8, 11, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.layer(self.table(ids))))
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(3)), torch.arange(8) % 3


def compared(make: Callable[[], nn.Module], cut: str, cast: bool) -> None:
    """Compare a step of two stages with one of the whole model, on one rank."""
    torch.manual_seed(0)
    whole = make()
    model = NxDPPModel(copy.deepcopy(whole), num_microbatches=MICROBATCHES, pipeline_cuts=[cut])
    wanted = torch.zeros(())
    for part in zip(*(tensor.chunk(MICROBATCHES) for tensor in batch()), strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            loss = whole(*part) / MICROBATCHES
        loss.backward()
        wanted += loss.detach()
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        torch.testing.assert_close(model.run_train(*batch()), wanted)
        torch.testing.assert_close(model.run_eval(*batch()), wanted)
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, msg=lambda text, n=name: n + text)


def every_cut(make: Callable[[], nn.Module], cuts: list[str], cast: bool) -> None:
    for cut in cuts:
        compared(make, cut, cast)


def partly_frozen(zero1: bool) -> None:
    """Only what the last stage has is trained, and only that is given to the optimizer."""
    torch.manual_seed(0)
    whole = Layers()
    whole.first.requires_grad_(False)
    model = NxDPPModel(copy.deepcopy(whole), num_microbatches=MICROBATCHES, pipeline_cuts=["first"])
    trained = [p for p in whole.parameters() if p.requires_grad]
    alone = torch.optim.AdamW(trained, lr=0.1)
    optimizer = NxDOptimizer(
        (p for p in model.parameters() if p.requires_grad), torch.optim.AdamW, zero1=zero1, defaults={"lr": 0.1}
    )
    for _ in range(2):
        whole(*batch()).backward()
        model.run_train(*batch())
        wanted = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for one in (alone, optimizer):
            one.step()
            one.zero_grad()
        torch.testing.assert_close(optimizer.grad_norm, wanted)
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter, whole.get_parameter(name))


@pytest.mark.parametrize("zero1", [False, True])
def test_a_stage_may_train_nothing(zero1: bool):
    run_ranks(partly_frozen, 2, zero1, tp=1, pp=2)


def summed(count: int) -> float:
    """The relative error of a tied weight's gradient over many microbatches, which is to be summed in float32."""
    torch.manual_seed(0)
    whole = Tied()
    model = NxDPPModel(copy.deepcopy(whole), num_microbatches=count, pipeline_cuts=["layer"])
    optimizer = NxDOptimizer(model.parameters(), torch.optim.SGD, fp32_grad_acc=True, defaults={"lr": 1.0})
    ids = torch.randint(0, 11, (count, 6))
    wanted = torch.zeros(11, 8)
    for row in ids:
        whole.zero_grad()
        (whole(row[None], row[None].roll(1, 1)) / count).backward()
        wanted += whole.table.weight.grad
    model.run_train(ids, ids.roll(1, 1))
    if current_context().pp.rank:
        return 0.0
    return float((optimizer._reducer.gradient(0) - wanted).norm() / wanted.norm())


def test_gradients_of_a_borrowed_weight_are_summed_in_float32():
    assert run_ranks(summed, 2, 128, tp=1, pp=2)[0] < 2**-8  # it is rounded once, when it goes back


def test_complex_values_are_handed_on_with_their_gradients():
    run_ranks(every_cut, 2, Waves, ["second"], False, tp=1, pp=2)


def test_values_have_the_types_of_autocast():
    run_ranks(every_cut, 2, Layers, ["first", "second"], True, tp=1, pp=2)
