"""Loops that tests/unit runs on one rank and tests/integration on two: NaN gradients, precision, closures, copies."""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import partial
from typing import Any

import torch
from torch import nn

from nxd_infer.context import current_context
from nxd_infer.errors import NonFiniteGradientError
from nxd_infer.optimizer import NxDOptimizer
from tests.support.trainer.jobs import AdamW, mine, training
from tests.support.trainer.models import MLP, decoder, mlp, tokens, vectors

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


def low_precision(zero1: bool) -> dict[str, Any]:
    """bfloat16 weights with float32 masters and accumulators against float32 training on the same gradients' stream."""
    found: dict[str, Any] = {}
    for masters in (True, False):
        model, optimizer = training(
            partial(MLP, torch.bfloat16),
            optimizer_config={"zero_one_enabled": zero1, "grad_clipping": False, "bucket_cap_mb": 0.01},
            mixed_precision_config={"use_master_weights": masters, "use_fp32_grad_acc": masters},
            optimizer_class=torch.optim.SGD,
        )
        name = "down.weight"
        weight = model.get_parameter(name)
        start = weight.detach().float().clone()
        total = torch.zeros_like(start)
        for _ in range(6):
            for part in range(4):
                rows = {key: value[part : part + 1] for key, value in mine(vectors(torch.bfloat16, 16)).items()}
                model.run_train(**rows)
            total += optimizer.named_gradients()[name].float()
            optimizer.step()
            optimizer.zero_grad()
        # What SGD makes of the sum of all gradients, in float32.
        wanted = start - 1e-2 * total
        found[f"dtype {masters}"] = weight.dtype
        found[f"gap {masters}"] = float((weight.detach().float() - wanted).norm() / (wanted - start).norm())
        found[f"held {masters}"] = float((weight.detach() - wanted.bfloat16()).abs().max())
        found[f"state {masters}"] = {piece.tensor.dtype for piece in optimizer.pieces}
        found[f"grads {masters}"] = weight.grad is None and getattr(weight, "main_grad", None) is None
    return found


def check_low_precision(found: dict[str, Any]) -> None:
    assert found["dtype True"] == found["dtype False"] == torch.bfloat16
    assert found["state True"] == {torch.float32} and found["state False"] == {torch.bfloat16}
    assert found["held True"] == 0  # the weight is its master rounded once, whatever the number of steps
    assert found["gap False"] > 3 * found["gap True"]  # without masters small steps are lost
    assert found["grads True"]


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
