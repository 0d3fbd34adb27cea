"""Steps over ranks against the same steps of plain PyTorch; odd habits of loops; ranks that differ; no numbers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxd_infer import comm, parallel_state
from nxd_infer.context import current_context
from nxd_infer.errors import NonFiniteGradientError
from nxd_infer.optimizer import NxDOptimizer
from tests.support.ranks import run_ranks
from tests.support.trainer.jobs import mine, training
from tests.support.trainer.models import tokens

F64 = torch.float64

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 0.05, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
]


class Odd(nn.Module):
    """Sizes that two ranks cannot share equally; some parameters get no gradient in some steps, or in none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(5, 3, dtype=F64))
        self.scale = nn.Parameter(torch.randn((), dtype=F64))
        self.late = nn.Parameter(torch.randn(3, dtype=F64))
        self.still = nn.Parameter(torch.randn(3, dtype=F64))
        self.unused = nn.Parameter(torch.randn(2, dtype=F64))
        self.nothing = nn.Parameter(torch.zeros(0, dtype=F64))
        self.frozen = nn.Parameter(torch.randn(5, dtype=F64), requires_grad=False)
        self.thawed = nn.Parameter(torch.randn(7, 3, dtype=F64), requires_grad=False)

    def forward(self, x: Tensor, late: bool) -> Tensor:
        y = torch.tanh((x + self.frozen) @ self.weight + self.still) * self.scale + self.thawed.sum(0)
        return (y * self.late if late else y).square().mean() + self.nothing.sum()

    def groups(self) -> list[dict[str, Any]]:
        decay = {"weight_decay": 0.1}
        return [
            {"params": [self.weight, self.frozen], **decay},
            {"params": [self.scale, self.late, self.unused, self.nothing], "lr": 0.02},
            {"params": [self.still], "lr": 0.0},
            {"params": []},
        ]


def add(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Add a group. Plain Adagrad of torch 2.9 cannot step one that is added: it has no state for it."""
    optimizer.add_param_group(group)
    if isinstance(optimizer, torch.optim.Adagrad):
        for param, state in torch.optim.Adagrad(group["params"]).state.items():
            optimizer.state.setdefault(param, state)


def steps(model: Odd, optimizer: torch.optim.Optimizer, rows: Tensor, restart: Callable[..., Any]) -> list[Tensor]:
    """Eight steps; a group is added after three, the optimizer made anew from its state after five."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    norms: list[Tensor] = []
    for step in range(8):

        def closure(late: bool = step % 2 == 1) -> Tensor:
            loss = model(rows, late)
            loss.backward()
            return loss

        if isinstance(optimizer, NxDOptimizer):
            assert optimizer.step(closure) > 0
            norms.append(optimizer.grad_norm)  # pyright: ignore[reportArgumentType]
        else:
            closure()
            members = [p for group in optimizer.param_groups for p in group["params"]]
            norms.append(torch.nn.utils.clip_grad_norm_(members, 0.5))
            optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=step != 2)
        if step == 3:
            model.thawed.requires_grad_()
            add(optimizer, {"params": [model.thawed], "weight_decay": 0.2})
        if step == 5:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = restart(model)
            optimizer.load_state_dict(state)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    return norms


def compared(zero1: bool) -> list[str]:
    """What differs from one process of plain PyTorch that has all the rows."""
    found = []
    dp = current_context().dp
    rows = torch.randn(6, 5, dtype=F64, generator=torch.Generator().manual_seed(1))
    for kind, options in OPTIMIZERS:
        results = []
        for ours in (True, False):

            def make(model: Odd, ours: bool = ours, kind: Any = kind, options: Any = options) -> Any:
                if not ours:
                    return kind(model.groups(), **options)
                settings: Any = {"zero1": zero1, "max_grad_norm": 0.5, "bucket_cap_mb": 1e-4}
                return NxDOptimizer(model.groups(), kind, defaults=options, **settings)

            def restart(model: Odd, make: Any = make) -> Any:
                optimizer = make(model)
                add(optimizer, {"params": [model.thawed]})
                return optimizer

            model = Odd()
            mine = rows.chunk(dp.degree)[dp.rank] if ours else rows
            norms = steps(model, make(model), mine, restart)
            results.append({**dict(model.named_parameters()), "the norms": torch.stack(norms)})
        for name, wanted in results[1].items():
            if not torch.allclose(results[0][name], wanted, rtol=1e-10, atol=1e-12):
                found.append(f"{kind.__name__} zero1={zero1}: {name}: {results[0][name]} for {wanted}")
    return found


def both_ways() -> list[str]:
    return compared(False) + compared(True)


def test_steps_on_one_rank_and_over_two():
    for found in (both_ways(), *run_ranks(both_ways, 2, tp=1)):
        assert not found, "\n".join(found)


# --- odd habits ---------------------------------------------------------------------------------------------


def sgd(params: list[nn.Parameter], **options: Any) -> NxDOptimizer:
    return NxDOptimizer(params, torch.optim.SGD, grad_clipping=False, defaults={"lr": 1.0}, **options)


def habits() -> dict[str, Any]:
    """On two data-parallel ranks: weights that begin at zero, so that after each they are minus the mean gradient."""
    rank, found = current_context().dp.rank, {}

    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    optimizer = sgd([first, second])
    (first.sum() + (second.sum() if rank == 0 else 0)).backward()  # rank 1 gets what it has no gradient for
    optimizer.step()
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        (first.sum() * 2 + second.sum() * (rank + 1)).backward()
        optimizer.step()
    found["zeroed in place"] = [first.tolist(), second.tolist()]

    weight = nn.Parameter(torch.zeros(2))
    optimizer = sgd([weight])
    for value in (1.0, 3.0):
        weight.sum().backward()
        weight.grad = None
        weight.grad = torch.full((2,), value)  # perhaps where the other one was
        optimizer.step()
    found["replaced"] = weight.tolist()

    table = nn.Embedding(4, 2, sparse=True)
    nn.init.zeros_(table.weight)
    optimizer = sgd([table.weight])
    table(torch.tensor([rank, 3])).sum().backward()
    optimizer.step()
    found["sparse"] = table.weight.tolist()

    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    for zero1 in (False, True):
        optimizer = sgd([frozen], zero1=zero1)
        optimizer.step()
        frozen.requires_grad_()
        optimizer = sgd([nn.Parameter(torch.zeros(0)), frozen], zero1=zero1)
        frozen.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        frozen.requires_grad_(False)
    found["frozen"] = frozen.tolist()

    for masters in (False, True):
        narrow = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        for zero1 in (False, True):
            optimizer = sgd([narrow], zero1=zero1, master_weights=masters, fp32_grad_acc=True)
            for value in (256.0, 1.0, 1.0):  # 257 and 258 in bfloat16: 256 and 258
                (narrow * value).sum().backward()
            optimizer.synchronize_gradients()
            (narrow * 2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found[f"narrow {masters}"] = narrow.tolist()
    return found


def check_habits(found: dict[str, Any], ranks: int) -> None:
    mean = 1.5 if ranks == 2 else 1.0
    assert found["zeroed in place"] == [[-5.0] * 2, [-1 / ranks - 2 * mean] * 3]
    assert found["replaced"] == [-4.0] * 2
    rows = [-0.5, -0.5, 0.0, -1.0] if ranks == 2 else [-1.0, 0.0, 0.0, -1.0]
    assert found["sparse"] == [[row, row] for row in rows]
    assert found["frozen"] == [-2.0] * 2
    assert found["narrow False"] == found["narrow True"] == [-520.0] * 3


def test_habits():
    check_habits(habits(), 1)
    for found in run_ranks(habits, 2, tp=1):
        check_habits(found, 2)


def two_optimizers(split: bool) -> list[Tensor]:
    """Two optimizers, one backward; split over ranks, the second rank's does not reach the second optimizer."""
    layers = [nn.Linear(4, 4, bias=False, dtype=F64) for _ in range(2)]
    for layer in layers:
        nn.init.constant_(layer.weight, 0.25)
    optimizers = [sgd(list(layer.parameters())) for layer in layers]
    for _ in range(2):
        hidden = layers[0](torch.ones(1, 4, dtype=F64))
        first, second = layers[1](hidden).sum(), hidden.sum()
        loss = (first if current_context().dp.rank == 0 else second) if split else (first + second) / 2
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [layer.weight.detach() for layer in layers]


def test_a_backward_that_reaches_one_of_two_optimizers():
    wanted = two_optimizers(False)
    for found in run_ranks(two_optimizers, 2, True, tp=1):
        torch.testing.assert_close(found, wanted)


def collective_before_the_step(zero1: bool) -> list[Tensor]:
    """In turns one rank does not use a parameter, and the loop averages the loss between backward and step."""
    context = current_context()
    first, second = (torch.nn.Parameter(torch.full((3,), 2.0)) for _ in range(2))
    optimizer = NxDOptimizer([first, second], torch.optim.SGD, zero1=zero1, grad_clipping=False, defaults={"lr": 0.5})
    found = []
    for step in range(4):
        for part in range(1 + step // 2):
            loss = first.sum() + (second.sum() if (context.rank + step + part) % 2 else 0)
            loss.backward()
            found.append(comm.all_reduce(loss.detach(), context, "dp"))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, first.detach(), second.detach()]


@pytest.mark.parametrize("zero1", [False, True])
def test_a_collective_of_the_loop_before_the_step(zero1: bool):
    first = torch.nn.Parameter(torch.full((3,), 2.0))
    second, losses = first.detach().clone(), []
    for parts in (1, 1, 2, 2):  # every pass gives the second one half of the first one's gradient
        losses += [(2 * first.sum() + second.sum()).detach()] * parts
        first, second = first.detach() - 0.5 * parts, second - 0.25 * parts
    for found in run_ranks(collective_before_the_step, 2, zero1, tp=1):
        torch.testing.assert_close(found, [*losses, first, second])


# --- numbers ------------------------------------------------------------------------------------------------


NAMES = ("model.layers.1.mlp.down_proj.weight",)


def poisoned(zero1: bool) -> list:
    """One rank has a NaN in one parameter: every rank names it, and no weight and no state changes."""
    found: list = []
    for how in ("raise", "skip"):
        config = {"zero_one_enabled": zero1, "on_nonfinite": how, "grad_clipping": how == "raise"}
        model, optimizer = training(optimizer_config=config)
        model.run_train(**mine(tokens()))
        optimizer.step()
        optimizer.zero_grad()
        before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        model.run_train(**mine(tokens()))
        if current_context().rank == current_context().world_size - 1:
            grad = model.get_parameter("model.layers.1.mlp.down_proj.weight").grad
            assert grad is not None
            grad[3, 2] = float("nan")
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                optimizer.step()
            assert "step skipped: gradients are NaN or infinite: model.layers.1.mlp" in str(warned[0].message)
            found.append(optimizer.skipped_steps)
        except NonFiniteGradientError as error:
            found.append(error.names)
            assert "on_nonfinite" in str(error) and isinstance(error, ArithmeticError)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        after = optimizer.state_dict()["state"]
        assert all(torch.equal(after[i]["exp_avg"], s["exp_avg"]) for i, s in state["state"].items())
        optimizer.zero_grad()
        model.run_train(**mine(tokens()))
        optimizer.step()  # and training goes on
        assert not torch.equal(model.state_dict()["lm_head.weight"], before["lm_head.weight"])
    return found


def poisoned_over_ranks() -> list:
    found = []
    for tp in (1, 2):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tp)
        found += [poisoned(False), poisoned(True)]
    return found


def test_nonfinite_gradients_on_one_rank():
    for found in run_ranks(poisoned_over_ranks, 2):
        assert found == [[NAMES, 1]] * 4


def replicated_only() -> list[Tensor]:
    """A model that every tensor-parallel rank holds whole; only the first of them counts it in the norm."""
    model = nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3))
    torch.manual_seed(0)
    for param in model.parameters():
        nn.init.normal_(param)
    optimizer = NxDOptimizer(model.parameters(), torch.optim.AdamW, max_grad_norm=0.1, defaults={"lr": 0.1})
    rows = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    norms = []
    for _ in range(20):
        model(rows).square().mean().backward()
        optimizer.step()
        norms.append(optimizer.grad_norm)
        optimizer.zero_grad()
    return [torch.stack(norms), *model.parameters()]


def test_replicas_stay_bit_equal():
    first, second = run_ranks(replicated_only, 2, tp=2)
    assert first[0].dtype == torch.float32
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(first, second, strict=True))
