"""Two stages of models with values and weights of several kinds, over messages and in lock step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.optimizer import NxDOptimizer
from nxd_infer.pipeline import NxDPPModel
from tests.support.pipeline.models import (
    Called,
    Lazy,
    Masked,
    decoder,
    encoder,
    sentences,
    tokens,
)
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


class Counts(nn.Linear):
    """Returns a number beside its tensor: ``of`` its input's values, or always the same."""

    def __init__(self, of: bool):
        super().__init__(4, 4)
        self.of = of

    def forward(self, input: Tensor) -> tuple[Tensor, float]:
        return super().forward(input), float(input.sum()) if self.of else 2.0


def counted(model: Any, x: Tensor) -> Tensor:
    x, number = model.first(x)
    return model.last(model.second(x * number))


def masked(model: Any, x: Tensor) -> Tensor:
    x = model.first(x)
    model.last.mask = torch.sigmoid(x)
    return model.last(model.second(x))


def in_order(model: Any, x: Tensor) -> Tensor:
    return model.last(model.second(model.first(x)))


def handed() -> str:
    """Compare with one process; return what the value of a number that cannot be handed is told."""
    torch.set_default_dtype(torch.float64)
    linears = [nn.Linear(4, 4) for _ in range(4)]
    models: dict[str, Any] = {
        "lazy": Called(Lazy(), Lazy(True), in_order),
        "number": Called(Counts(False), linears[0], counted),
        "attribute": Called(linears[1], linears[2], masked),
    }
    models["attribute"].last = Masked(4, 4)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    for name, model in models.items():
        pipelined = NxDPPModel(copy.deepcopy(model), num_microbatches=3, pipeline_cuts=["first"])
        loss = model(x)
        loss.backward()
        for _ in range(2):
            pipelined.zero_grad()
            torch.testing.assert_close(pipelined.run_train(x), loss.detach())
        for path, parameter in pipelined.local_named_parameters():
            torch.testing.assert_close(parameter.grad, model.get_parameter(path).grad, msg=f"{name} {path}")
    wrong = NxDPPModel(Called(Counts(True), linears[3], counted), num_microbatches=3, pipeline_cuts=["first"])
    try:
        wrong.run_train(x)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("tied", 4, {"schedule": "gpipe"}),
    ("bert", 8, {}),
    ("tied", 4, {"schedule": "zero-bubble"}),
    ("tied", 2, {"virtual_pipeline_size": 2}),
]


def in_lock_step() -> list[str]:
    """Without messages between two ranks, over shared memory alone."""
    found = []
    for family, count, options in CASES:
        torch.manual_seed(3)
        make, given = (encoder, sentences()) if family == "bert" else (partial(decoder, family), tokens())
        whole = make(torch.float64)
        loss = whole(**given)[0]
        loss.backward()
        torch.manual_seed(3)
        model = NxDPPModel(make(torch.float64), auto_partition=True, num_microbatches=count, **options)
        got = float(model.run_train(**given))
        apart = [float((p.grad - whole.get_parameter(n).grad).norm()) for n, p in model.local_named_parameters()]
        evaluated = float(model.run_eval(**given))
        if max(apart) > 1e-10 or max(abs(one - float(loss.detach())) for one in (got, evaluated)) > 1e-10:
            found.append(f"{family} {count} {options}: {got}, {evaluated}, {float(loss)}, gradients {max(apart)}")
    return found


def on_two_stages() -> tuple[float, str]:
    for zero1 in (False, True):
        partly_frozen(zero1)
    compared(Waves, "second", False)
    for cut in ("first", "second"):
        compared(Layers, cut, True)
    return summed(64), handed()


def test_values_are_handed_on_with_their_gradients():
    """Complex ones, those of autocast, numbers, attributes; and a stage may train nothing."""
    (rounded, first), (_, second) = run_ranks(on_two_stages, 2, tp=1, pp=2)
    assert rounded < 2**-8, "a borrowed weight's gradient is rounded once, when it goes back"
    assert first.startswith("InputMismatchError: 'first' gave the Python value ")
    assert first.endswith("where its shapes promised 0.0, and only tensors are handed to other stages: return a tensor")
    assert second.startswith("CollectiveError: pipeline stage 0 (rank 0) failed:\nTraceback") and first in second


def test_in_lock_step():
    assert run_ranks(in_lock_step, 2, collectives="shm", pp=2) == [[], []]
