"""The wrapped optimizer through its wrapper: attributes, methods, state under the model's parameters, copies, hooks."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from nxd_infer.context import current_context
from nxd_infer.errors import NonFiniteGradientError
from nxd_infer.optimizer import NxDOptimizer
from tests.support.ranks import run_ranks
from tests.support.trainer.jobs import ZERO1, AdamW, mine, training
from tests.support.trainer.models import decoder, llama, mlp, tokens, vectors

MASTERS: dict[str, Any] = {"mixed_precision_config": {"use_master_weights": True}}
SETTINGS = [{}, MASTERS, ZERO1]


class Momentum(torch.optim.Optimizer):
    """An optimizer with attributes, a property and methods of its own, in words of its own."""

    def __init__(self, params: Any, lr: float, decay: float = 0.5):
        super().__init__(params, {"lr": lr, "decay": decay})
        self.scale, self.kind = 1.0, "momentum"

    @property
    def rate(self) -> float:
        return self.scale * self.param_groups[0]["lr"]

    def speed_of(self, factor: float) -> list[float]:
        return [factor * float(state["speed"].norm()) for state in self.state.values()]

    @torch.no_grad()
    def stop(self, also_weights: bool = False) -> str:
        for group in self.param_groups:
            group["lr"] = 0.25
            for param in group["params"]:
                self.state[param]["speed"].zero_()
                if also_weights:
                    param.zero_()
        return "stopped"

    @torch.no_grad()
    def step(self, closure: Any = None, times: int = 1) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                speed = self.state[param].setdefault("speed", torch.zeros_like(param))
                speed.mul_(group["decay"]).add_(param.grad)
                param.sub_(speed, alpha=times * self.scale * group["lr"])


def momentum(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    model, optimizer = training(partial(decoder, "llama", dtype), optimizer_class=Momentum, **options)
    model.run_train(**mine(tokens()))
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("options", SETTINGS, ids=["plain", "masters", "zero1"])
def test_attributes_and_methods_are_the_wrapped_optimizers(options: dict):
    model, optimizer = momentum(torch.bfloat16, **options)
    assert optimizer.kind == "momentum" and optimizer.rate == 1e-2
    optimizer.scale = 0.5  # one that its step reads
    assert optimizer.optimizer.scale == 0.5 and optimizer.rate == 5e-3
    optimizer.param_groups[0]["lr"] = 1.0
    assert max(optimizer.speed_of(factor=2.0)) > 0
    assert optimizer.optimizer.param_groups[0]["lr"] == 1.0  # its methods see what a schedule has set
    assert optimizer.stop() == "stopped" and max(optimizer.speed_of(2.0)) == 0
    assert optimizer.param_groups[0]["lr"] == 0.25
    optimizer.mine = 3  # one that it does not have stays here
    assert not hasattr(optimizer.optimizer, "mine") and optimizer.mine == 3
    assert optimizer.stop(also_weights=True) == "stopped"
    assert not any(param.any() for param in model.parameters())
    with pytest.raises(AttributeError, match=r"neither .*Optimizer nor the Momentum in it has an attribute 'kinds'"):
        _ = optimizer.kinds
    assert not hasattr(optimizer, "_private")


def test_attributes_are_deleted_where_they_are():
    _, optimizer = momentum()
    optimizer.mine = 3
    del optimizer.mine, optimizer.kind
    assert not hasattr(optimizer, "mine") and not hasattr(optimizer, "kind")
    assert not hasattr(optimizer.optimizer, "kind")
    for name, said in (
        ("kind", "neither .*Optimizer nor the Momentum in it"),
        ("stop", "stop"),
        ("grad_norm", "deleter"),
    ):
        with pytest.raises(AttributeError, match=said):
            delattr(optimizer, name)
    assert optimizer.stop() == "stopped" and optimizer.grad_norm is not None


def test_a_step_takes_what_the_wrapped_optimizers_does():
    once, twice = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizers = [
        NxDOptimizer([param], Momentum, defaults={"lr": 0.125}, grad_clipping=False) for param in (once, twice)
    ]
    (once.sum() + twice.sum()).backward()
    optimizers[0].step(times=1)
    optimizers[1].step(None, 2)
    assert torch.equal(1 - twice, 2 * (1 - once)) and once[0] == 0.875


class Uphill(torch.optim.SGD):
    """It steps by the gradients a little uphill, so it calls the closure in the middle; and it counts."""

    zeroed = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zeroed += 1
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, *, closure: Any) -> Any:
        members = [param for group in self.param_groups for param in group["params"]]
        before = [param.clone() for param in members]
        for param in members:
            param.add_(param.grad, alpha=0.5)
        self.zero_grad()
        loss = torch.enable_grad()(closure)()
        for param, value in zip(members, before, strict=True):
            param.copy_(value)
        super().step()
        return "uphill", float(loss)


def walked(make: Any, rows: torch.Tensor) -> tuple[torch.Tensor, list[Any], int]:
    """The weights after three steps over ``rows``, what the steps returned, and how often gradients were zeroed."""
    model = nn.Linear(rows.shape[1], 1, bias=False)
    nn.init.constant_(model.weight, 0.5)
    optimizer = make(list(model.parameters()))

    def closure() -> torch.Tensor:
        loss = model(rows).pow(2).mean()
        loss.backward()
        return loss

    returned = []
    for _ in range(3):
        if isinstance(optimizer, Uphill):
            closure()  # the wrapper does
        returned.append(optimizer.step(closure=closure))
        optimizer.zero_grad()
    return model.weight.detach(), returned, optimizer.zeroed


def uphill(params: Any, **options: Any) -> NxDOptimizer:
    return NxDOptimizer(params, Uphill, defaults={"lr": 0.1}, grad_clipping=False, **options)


ROWS = torch.arange(12, dtype=torch.float32).view(4, 3) / 10
PLAIN = partial(Uphill, lr=0.1)


@pytest.mark.parametrize("options", [{}, {"master_weights": torch.float64}, {"zero1": True}], ids=str)
def test_an_optimizer_that_calls_the_closure_itself(options: dict):
    wanted, told, zeroed = walked(PLAIN, ROWS)
    weight, returned, count = walked(partial(uphill, **options), ROWS)
    torch.testing.assert_close(weight, wanted, rtol=1e-6, atol=0)
    for mine_, plain in zip(returned, told, strict=True):
        assert mine_ == (plain[0], pytest.approx(plain[1], rel=1e-6))
    assert count >= zeroed == 6


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_gradients_that_are_not_finite_in_the_middle_of_a_step(on_nonfinite: str):
    """The step is underway: it cannot be skipped, and would be made by them."""
    weight = nn.Parameter(torch.full((2,), 0.5))
    optimizer = uphill([weight], on_nonfinite=on_nonfinite)

    def closure() -> torch.Tensor:
        loss = (weight * float("inf" if weight.max() > 0.6 else 1)).sum()
        loss.backward()
        return loss

    with pytest.raises(NonFiniteGradientError, match="in the middle of its step"):
        optimizer.step(closure=closure)
    assert optimizer.skipped_steps == 0


def walked_apart(zero1: bool, width: int) -> torch.Tensor:
    half = ROWS[2 * current_context().dp.rank :, :width][:2]
    return walked(partial(uphill, zero1=zero1), half)[0]


@pytest.mark.parametrize(("zero1", "width"), [(False, 3), (True, 3), (True, 1)])
def test_ranks_call_the_closure_together(zero1: bool, width: int):
    """Also where one of them has no element to update."""
    wanted = walked(PLAIN, ROWS[:, :width])[0]
    for weight in run_ranks(walked_apart, 2, zero1, width, tp=1):
        torch.testing.assert_close(weight, wanted, rtol=1e-5, atol=0)


def test_a_closure_is_called_once_for_an_optimizer_that_asks_first():
    model, calls = nn.Linear(3, 2), []
    optimizer = NxDOptimizer(model.parameters(), torch.optim.AdamW, defaults={"lr": 0.1})

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(ROWS).pow(2).mean()
        loss.backward()
        calls.append(loss)
        return loss

    for number in range(1, 4):
        assert optimizer.step(closure) is calls[-1] and len(calls) == number


@pytest.mark.parametrize("options", SETTINGS, ids=["plain", "masters", "zero1"])
def test_state_is_found_under_the_models_parameters(options: dict):
    model, optimizer = momentum(torch.bfloat16, **options)
    params = list(model.parameters())
    assert {id(param) for param in optimizer.state} == {id(param) for param in params}
    for param in params:
        assert list(optimizer.state[param]) == ["speed"] and param in optimizer.state
        assert optimizer.state[param]["speed"].numel() == param.numel()
    first = params[0]
    optimizer.state[first]["speed"].fill_(2.0)
    assert max(optimizer.speed_of(1.0)) == pytest.approx(2.0 * first.numel() ** 0.5, rel=1e-2)
    optimizer.state[first] = {"speed": torch.zeros_like(optimizer.state[first]["speed"])}
    assert min(optimizer.speed_of(1.0)) == 0
    del optimizer.state[first]
    assert first not in optimizer.state and optimizer.state.get(first) is None
    assert len(optimizer.state) == len(params) - 1 == len(optimizer.state_dict()["state"])
    optimizer.state = {}
    assert not optimizer.state and not optimizer.state_dict()["state"]
    model.run_train(**tokens())
    optimizer.step()
    assert len(optimizer.state) == len(params)


def state_of_a_share() -> list[float]:
    """How much of each parameter this rank holds a state of; asking for the others' changes nothing."""
    model, optimizer = momentum(**ZERO1)
    found = []
    for param in model.parameters():
        state = optimizer.state[param]
        found.append(state["speed"].numel() / param.numel() if param in optimizer.state else float(len(state)))
        if param not in optimizer.state:
            with pytest.raises(KeyError, match="other ranks update this parameter"):
                state["speed"] = param
            with pytest.raises(KeyError, match="other ranks update this parameter"):
                state.setdefault("speed", param)
    before = model.state_dict()["lm_head.weight"].clone()
    assert len(optimizer.state_dict()["state"]) == len(optimizer.state)
    optimizer.stop(also_weights=True)  # what it does to its share reaches the parameters of all
    assert before.any() and not model.state_dict()["lm_head.weight"].any()
    return found


def test_state_with_zero1_is_this_ranks_share():
    first, second = run_ranks(state_of_a_share, 2, tp=1)
    assert [a + b for a, b in zip(first, second, strict=True)] == pytest.approx([1.0] * len(first))
    assert 0.0 in first and 0.0 in second


class Decaying(Momentum):
    @torch.no_grad()
    def shrink(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if group["shrink"] != 1:
                    param.mul_(group["shrink"])


def shrunk() -> tuple[int, list[list[float]]]:
    """How much of the weights that shrink this rank steps, and what has become of all."""
    some, others = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    groups = [{"params": [some], "shrink": 0.5}, {"params": [others], "shrink": 1.0}]
    optimizer = NxDOptimizer(groups, Decaying, zero1=True, defaults={"lr": 1.0})
    optimizer.shrink()
    ours = sum(piece.tensor.numel() for piece in optimizer.pieces if piece.param is some)
    (some.sum() * 0 + others.sum() * 0).backward()
    optimizer.step()
    return ours, [some.tolist(), others.tolist()]


def test_a_method_that_changes_weights_of_one_rank_reaches_all():
    (first, ours), (second, theirs) = run_ranks(shrunk, 2, tp=1)
    assert {first, second} == {0, 4}
    assert ours == theirs == [[0.5] * 4, [1.0] * 4]


# --- copies -------------------------------------------------------------------------------------------------


def goes_on(model: Any, optimizer: Any, batch: dict, count: int = 2) -> list[torch.Tensor]:
    for _ in range(count):
        optimizer.zero_grad()
        model.run_train(**batch)
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def copied(dtype: torch.dtype, options: dict, how: str) -> list[bool]:
    """A copy of a model with its optimizer trains on as the original does, and neither touches the other."""
    build = partial(mlp) if dtype == torch.float32 else partial(decoder, "tied", dtype)
    batch = mine(vectors() if dtype == torch.float32 else tokens())
    model, optimizer = training(build, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    goes_on(model, optimizer, batch)
    scheduler.step()
    before = [param.detach().clone() for param in model.parameters()]
    if how == "pickle":
        twin, other = pickle.loads(pickle.dumps((model, optimizer)))
    elif how == "optimizer first":
        other, twin = copy.deepcopy((optimizer, model))
    else:
        twin, other = copy.deepcopy((model, optimizer))
    assert type(other) is type(optimizer) and type(other.optimizer) is AdamW
    assert [id(p) for p in other.param_groups[0]["params"]] == [id(p) for p in twin.parameters()]
    assert other.param_groups[0]["lr"] == 5e-3 and len(other.state) == len(optimizer.state)
    theirs = goes_on(twin, other, batch)
    untouched = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    ours = goes_on(model, optimizer, batch)
    equal = all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
    moved = any(not torch.equal(a, b) for a, b in zip(before, ours, strict=True))
    named = other.names == optimizer.names and other.state_dict().keys() == optimizer.state_dict().keys()
    return [untouched, equal, moved, named]


@pytest.mark.parametrize("how", ["model first", "optimizer first", "pickle"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_copy_goes_on_alike(dtype: torch.dtype, how: str):
    for options in SETTINGS:
        assert copied(dtype, options, how) == [True] * 4


def copied_over_ranks() -> list[list[bool]]:
    sequence = {"sequence_parallel": True} if current_context().tp.degree > 1 else {}
    return [
        copied(torch.float32, {**ZERO1, **sequence}, "model first"),
        copied(torch.bfloat16, ZERO1, "optimizer first"),
        copied(torch.float32, sequence, "optimizer first"),
    ]


@pytest.mark.parametrize("tp", [1, 2])
def test_copies_over_ranks_go_on_alike(tp: int):
    assert run_ranks(copied_over_ranks, 2, tp=tp) == [[[True] * 4] * 3] * 2


def test_an_optimizer_is_copied_alone():
    model, optimizer = training(llama, **ZERO1)
    goes_on(model, optimizer, tokens())
    twin = copy.deepcopy(optimizer)
    wanted = vars(next(model.parameters()))
    assert wanted.keys() <= vars(twin.param_groups[0]["params"][0]).keys()
    assert twin.group_names == optimizer.group_names and twin.grad_norm == optimizer.grad_norm
    for mine_, theirs in zip(optimizer.state.values(), twin.state.values(), strict=True):
        assert torch.equal(mine_["exp_avg"], theirs["exp_avg"]) and mine_["exp_avg"] is not theirs["exp_avg"]
    model.run_train(**tokens())
    assert twin.param_groups[0]["params"][0].grad is None
    assert copy.deepcopy(twin).names == optimizer.names


def test_hooks_on_a_state_dict():
    _, optimizer = momentum()
    seen: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda one: seen.append("saving"))
    optimizer.register_state_dict_post_hook(lambda one, state: {**state, "note": 1})
    optimizer.register_load_state_dict_pre_hook(lambda one, state: {k: v for k, v in state.items() if k != "note"})
    optimizer.register_load_state_dict_post_hook(lambda one: seen.append("loaded"))
    state = optimizer.state_dict()
    assert state["note"] == 1
    optimizer.load_state_dict(state)
    assert seen == ["saving", "loaded"]
