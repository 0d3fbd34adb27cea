"""Steps over ranks against the same steps of plain PyTorch: optimizers, groups, sizes, and odd habits of loops."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.errors import CheckpointError, ParallelConfigError
from nxd_infer.optimizer import NxDOptimizer
from nxd_infer.parallel_layers.grads import get_grad_norm
from tests.support.ranks import run_ranks

F64 = torch.float64
OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 0.05, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    (torch.optim.NAdam, {"lr": 0.05}),
    (torch.optim.Rprop, {"lr": 0.01}),
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


@pytest.mark.parametrize("zero1", [False, True])
def test_steps_in_one_process(zero1: bool):
    assert compared(zero1) == []


def both_ways() -> list[str]:
    return compared(False) + compared(True)


def test_steps_over_ranks():
    for rank, found in enumerate(run_ranks(both_ways, 2, tp=1)):
        assert not found, f"rank {rank}:\n" + "\n".join(found)


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


def test_habits_in_one_process():
    check_habits(habits(), 1)


def test_habits_over_ranks():
    for found in run_ranks(habits, 2, tp=1):
        check_habits(found, 2)


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


def test_a_state_may_be_loaded_before_its_model():
    """A master is not rounded by the narrow weights that are loaded after it, and follows weights that are others."""

    def make(values: Tensor) -> tuple[nn.Parameter, NxDOptimizer]:
        param = nn.Parameter(values.clone())
        return param, NxDOptimizer([param], torch.optim.SGD, master_weights=True, defaults={"lr": 1e-3})

    param, optimizer = make(torch.ones(4, dtype=torch.bfloat16))
    param.sum().backward()
    optimizer.step()
    assert torch.equal(param, torch.ones_like(param))  # the step is below the resolution of bfloat16
    state, weights = copy.deepcopy(optimizer.state_dict()), param.detach().clone()
    weights[3] = 5.0
    other, fresh = make(torch.zeros(4, dtype=torch.bfloat16))
    fresh.load_state_dict(state)
    with torch.no_grad():
        other.copy_(weights)  # what Module.load_state_dict does
    fresh.synchronize_gradients()
    master = fresh.pieces[0].tensor
    assert torch.equal(master[:3], optimizer.pieces[0].tensor[:3]) and master[0] != 1 and master[3] == 5


def test_refused_optimizers_and_parameters():
    param = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ParallelConfigError, match="LBFGS evaluates the model several times per step"):
        NxDOptimizer([param], torch.optim.LBFGS)
    for given in (torch.optim.Adafactor, functools.partial(torch.optim.Adafactor, lr=0.1)):
        with pytest.raises(ParallelConfigError, match="Adafactor needs whole matrices"):
            NxDOptimizer([param], given, zero1=True)
    NxDOptimizer([param], torch.optim.Adafactor)
    twice = "a parameter is more than once in the optimizer's groups"
    with pytest.raises(ParallelConfigError, match=twice):
        sgd([param, param])
    optimizer = sgd([param])
    with pytest.raises(ParallelConfigError, match=twice):
        optimizer.add_param_group({"params": [param]})
    named = NxDOptimizer([("weight", param), ("weight", nn.Parameter(torch.ones(2)))], torch.optim.SGD)
    assert named.names == ["weight", "group 0 parameter 1"]


def test_refused_forms_of_parameters():
    param = nn.Parameter(torch.ones(2))
    for given, kind, message in (
        ({param}, TypeError, "are a set, whose order differs from rank to rank"),
        ([{"params": {param}}], TypeError, "are a set"),
        ({"params": [param]}, TypeError, "not one dict"),
        ([3], TypeError, "got a int"),
        ([param * 2], ParallelConfigError, "not a leaf"),
        ([{"lr": 1}], ParallelConfigError, "a dict with the key 'params'"),
        ([{"params": [param]}, param], ParallelConfigError, "a dict with the key 'params'"),
    ):
        with pytest.raises(kind, match=message):
            NxDOptimizer(given, torch.optim.SGD)  # pyright: ignore[reportArgumentType]


def test_refused_states():
    optimizer, other = sgd([nn.Parameter(torch.ones(2))]), sgd([nn.Parameter(torch.ones(1)) for _ in range(2)])
    for state in (other.state_dict(), {"a": 1}, {"state": {}, "param_groups": []}):
        with pytest.raises(CheckpointError, match="it does not fit this optimizer"):
            optimizer.load_state_dict(state)


def cut_matrix() -> str:
    with pytest.raises(ParallelConfigError) as raised:
        NxDOptimizer([nn.Parameter(torch.ones(2, 2))], torch.optim.Adafactor)
    return str(raised.value)


def test_matrices_are_not_cut():
    assert all("needs whole matrices" in message for message in run_ranks(cut_matrix, 2, tp=2))


def norms_of_pieces() -> list[str]:
    """get_grad_norm over what ZeRO-1 steps of bfloat16 weights, after two backward passes, against torch."""
    found = []
    for masters in (True, False):
        torch.manual_seed(current_context().dp.rank)
        params = [nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in ((5, 3), (), (7,))]
        options: Any = {"zero1": True, "master_weights": masters, "fp32_grad_acc": masters, "bucket_cap_mb": 1e-4}
        optimizer = NxDOptimizer(params, torch.optim.SGD, max_grad_norm=0.1, defaults={"lr": 1.0}, **options)
        for _ in range(2):
            torch.stack([(p * torch.randn_like(p)).sum() for p in params]).sum().backward()
        whole = list(optimizer.named_gradients().values())
        for order in (1, 2, "inf"):
            wanted = torch.nn.utils.get_total_norm([g.float() for g in whole], float(order))
            norm = get_grad_norm([piece.tensor for piece in optimizer.pieces], order, zero1_optimizer=True)
            if norm.dtype != torch.float32 or not torch.allclose(norm, wanted, rtol=1e-6):
                found.append(f"masters={masters} {order}: {norm} for {wanted}")
        optimizer.step()
        length = torch.cat([p.detach().float().flatten() for p in params]).norm()
        if abs(float(length) - 0.1) > 1e-3:
            found.append(f"masters={masters}: stepped by {length}")
    return found


def test_norms_of_narrow_pieces():
    assert run_ranks(norms_of_pieces, 2, tp=1) == [[], []]
