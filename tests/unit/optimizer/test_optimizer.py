"""The optimizer wrapper: what users of a torch.optim.Optimizer expect, precision, refusals, who else moves weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxd_infer.checkpoint.api import save_checkpoint
from nxd_infer.context import make_context, use_context
from nxd_infer.errors import CheckpointError, ParallelConfigError
from nxd_infer.optimizer import NeuronZero1Optimizer, NxDOptimizer
from nxd_infer.parallel_layers import clip_grad_norm
from tests.support.trainer.jobs import ZERO1, AdamW, training
from tests.support.trainer.models import MLP, tokens, vectors

SGD, Adafactor = torch.optim.SGD, torch.optim.Adafactor

WEIGHT = nn.Parameter(torch.ones(2, 2))


@pytest.mark.parametrize("options", [{}, ZERO1], ids=["plain", "zero1"])
def test_it_is_an_optimizer(options: dict):
    model, optimizer = training(**options)
    assert isinstance(optimizer, torch.optim.Optimizer) and isinstance(optimizer, NxDOptimizer)
    assert isinstance(optimizer, NeuronZero1Optimizer) == bool(options)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert optimizer.param_groups[0]["lr"] == 1e-2 and optimizer.defaults["weight_decay"] == 0.01
    assert optimizer.grad_norm is None
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    assert model.run_train(**tokens()) > 0
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 5e-3
    norm = optimizer.grad_norm
    assert norm is not None and norm.shape == () and norm > 0
    state = optimizer.state[next(model.parameters())]
    assert state["exp_avg"].any() and len(optimizer.state) == len(list(model.parameters()))
    before = copy.deepcopy(model.state_dict())
    model.run_train(**tokens())
    optimizer.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == 5e-3  # the schedule reached what steps
    assert not torch.equal(before["lm_head.weight"], model.state_dict()["lm_head.weight"])
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    seen = []
    optimizer.register_step_post_hook(lambda *args: seen.append(1))
    assert optimizer.step(lambda: model.run_train(**tokens())) > 0
    assert seen == [1]


def test_without_clipping_there_is_no_norm():
    model, optimizer = training(optimizer_config={"grad_clipping": False})
    for clips in (False, True, False):  # also none of an earlier step
        optimizer.grad_clipping = clips
        model.run_train(**tokens())
        optimizer.step()
        assert (optimizer.grad_norm is not None) == clips


def test_parameter_groups_and_names():
    def decayed(model: nn.Module) -> list[dict]:
        norms = [p for name, p in model.named_parameters() if "norm" in name]
        rest = [p for name, p in model.named_parameters() if "norm" not in name]
        return [{"params": rest, "weight_decay": 0.5}, {"params": norms, "weight_decay": 0.0, "lr": 0.0}]

    model, optimizer = training(groups=decayed)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.5, 0.0]
    before = copy.deepcopy(model.state_dict())
    model.run_train(**tokens())
    optimizer.step()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if "norm" not in name}
    assert set(optimizer.names) == set(before)
    _, named = training(groups=lambda model: model.named_parameters())
    assert named.names == list(before)
    loose = NxDOptimizer([("weight", WEIGHT), ("weight", nn.Parameter(torch.ones(1)))], AdamW)
    assert loose.names == ["weight", "group 0 parameter 1"]


@pytest.mark.parametrize(
    ("given", "kind", "options", "error", "message"),
    [
        (WEIGHT, AdamW, {}, TypeError, "not one tensor"),
        ({WEIGHT}, SGD, {}, TypeError, "are a set, whose order differs from rank to rank"),
        ([{"params": {WEIGHT}}], SGD, {}, TypeError, "ordering of tensors in sets"),
        ({"params": [WEIGHT]}, SGD, {}, TypeError, "not one dict"),
        ([WEIGHT, WEIGHT], SGD, {}, ParallelConfigError, "a parameter is more than once in the optimizer's groups"),
        ([WEIGHT], AdamW, {"on_nonfinite": "hope"}, ParallelConfigError, 'must be "raise" or "skip"'),
        ([WEIGHT], AdamW, {"defaults": {"learning": 1}}, TypeError, "learning"),
        ([WEIGHT], torch.optim.LBFGS, {}, ParallelConfigError, "LBFGS evaluates the model several times per step"),
        ([WEIGHT], Adafactor, {"zero1": True}, ParallelConfigError, "Adafactor needs whole matrices"),
        ([WEIGHT], partial(Adafactor, lr=0.1), {"zero1": True}, ParallelConfigError, "Adafactor needs whole matrices"),
    ],
)
def test_what_it_refuses(given: Any, kind: Any, options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        NxDOptimizer(given, kind, **options)


def test_what_it_refuses_later():
    NxDOptimizer([WEIGHT], Adafactor)
    with use_context(make_context(2, 0, tp=2)), pytest.raises(ParallelConfigError, match="needs whole matrices"):
        NxDOptimizer([nn.Parameter(torch.ones(2, 2))], Adafactor)
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer = NxDOptimizer([WEIGHT, frozen], AdamW)
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        optimizer.add_param_group({"params": [WEIGHT]})
    frozen.requires_grad_()
    (frozen * 2).sum().backward()
    with pytest.raises(ParallelConfigError, match="frozen when the optimizer was created"):
        optimizer.step()
    other = NxDOptimizer([nn.Parameter(torch.ones(1)) for _ in range(3)], SGD)
    for state in (other.state_dict(), {"a": 1}, {"state": {}, "param_groups": []}):
        with pytest.raises(CheckpointError, match="it does not fit this optimizer"):
            optimizer.load_state_dict(state)


@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("zero1", [False, True])
def test_master_weights(zero1: bool, masters: bool):
    """bfloat16 weights, with float32 masters and accumulators or not, against SGD in float32 on the same gradients."""
    model, optimizer = training(
        partial(MLP, torch.bfloat16),
        optimizer_config={"zero_one_enabled": zero1, "grad_clipping": False, "bucket_cap_mb": 0.01},
        mixed_precision_config={"use_master_weights": masters, "use_fp32_grad_acc": masters},
        optimizer_class=SGD,
    )
    weight = model.get_parameter("down.weight")
    start = weight.detach().float().clone()
    total = torch.zeros_like(start)
    for _ in range(6):
        for part in range(4):
            model.run_train(**{key: value[part : part + 1] for key, value in vectors(torch.bfloat16, 16).items()})
        total += optimizer.named_gradients()["down.weight"].float()
        optimizer.step()
        optimizer.zero_grad()
    wanted = start - 1e-2 * total
    assert weight.dtype == torch.bfloat16
    assert {piece.tensor.dtype for piece in optimizer.pieces} == {torch.float32 if masters else torch.bfloat16}
    gap = (weight.detach().float() - wanted).norm() / (wanted - start).norm()
    assert (gap < 0.1) == masters  # without masters small steps are lost
    if masters:
        assert torch.equal(weight, wanted.bfloat16())  # its master rounded once, whatever the number of steps
        assert weight.grad is None and getattr(weight, "main_grad", None) is None


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


Change = Callable[[list[dict[str, Any]], nn.Parameter], object]


CHANGES: list[tuple[Change, str]] = [
    (lambda groups, more: groups[0]["params"].append(more), "group 0 has 'more' in addition"),
    (
        lambda groups, more: groups[1].update(params=[more]),
        r"group 1 has 'more' in addition; group 1 lacks 'parameter 0 of shape \(3,\)'",
    ),
    (lambda groups, more: groups[0]["params"].extend(groups[0]["params"]), "group 0 has 'parameter 0"),
    (lambda groups, more: groups.pop(), "it has 1 groups instead of 2"),
    (lambda groups, more: groups.append({"params": [], "lr": 1.0}), "it has 3 groups instead of 2"),
]


@pytest.mark.parametrize(("change", "said"), CHANGES, ids=["appended", "replaced", "twice", "one less", "empty"])
def test_groups_that_were_changed_are_refused(change: Change, said: str, tmp_path: Path):
    """The wrapped optimizer has its own: what was appended was never stepped, and nothing said so."""
    more = nn.Parameter(torch.ones(2))
    more.nxd_name = "more"  # pyright: ignore[reportAttributeAccessIssue]
    params = [nn.Parameter(torch.ones(size)) for size in (2, 3)]
    optimizer: Any = NxDOptimizer([{"params": [p]} for p in params], torch.optim.SGD, defaults={"lr": 0.5})
    optimizer.param_groups[0]["params"] = list(reversed(optimizer.param_groups[0]["params"]))  # the order is free
    change(optimizer.param_groups, more)
    sum(p.sum() for p in (*params, more)).backward()  # pyright: ignore[reportAttributeAccessIssue]
    calls = [optimizer.step, copy.deepcopy(optimizer).step, optimizer.state_dict, optimizer.synchronize_gradients]
    for ask in (*calls, lambda: save_checkpoint(tmp_path, "a", optimizer=optimizer)):
        with pytest.raises(
            ParallelConfigError, match=f"param_groups was changed, .*{said}.* call optimizer.add_param_group"
        ):
            ask()
    assert all(torch.equal(p, torch.ones_like(p)) for p in params)


BF16 = torch.bfloat16


def sgd(params: Any, lr: float = 0.5, **options: Any) -> NxDOptimizer:
    return NxDOptimizer(params, torch.optim.SGD, grad_clipping=False, defaults={"lr": lr}, **options)


def linear(dtype: torch.dtype = BF16) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4, bias=False, dtype=dtype)


def backward(*layers: nn.Linear) -> None:
    nn.Sequential(*layers)(torch.ones(1, 4, dtype=layers[0].weight.dtype)).sum().backward()


def moved(weight: Tensor, optimizer: NxDOptimizer) -> bool:
    before = weight.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    return not torch.equal(before, weight)


def test_a_gradient_scaler_steps_plain_weights_and_is_refused_elsewhere():
    layer, scaler = linear(torch.float32), torch.amp.GradScaler("cpu", init_scale=1024.0)
    before, optimizer = layer.weight.detach().clone(), sgd(layer.parameters())
    scaler.scale(layer(torch.ones(1, 4)).sum()).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(layer.weight.detach(), before - 0.5)
    scaler.update()
    optimizer.context = make_context(2, 0, tp=1)
    optimizer.zero_grad()
    scaler.scale(layer(torch.ones(1, 4)).sum()).backward()
    with pytest.raises(ParallelConfigError, match="use bfloat16 autocast"):
        scaler.step(optimizer)
    layer = linear(torch.float16)
    optimizer = sgd(layer.parameters(), master_weights=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(layer(torch.ones(1, 4, dtype=torch.float16)).sum()).backward()
    with pytest.raises(ParallelConfigError, match="use bfloat16 autocast"):
        scaler.step(optimizer)


def test_two_optimizers_share_a_backbone():
    backbone, first, second = linear(), linear(), linear()
    options: dict[str, Any] = {"use_grad_acc_hook": True, "lr": 0.5}
    optimizers = [
        NeuronZero1Optimizer([*backbone.parameters(), *head.parameters()], torch.optim.SGD, **options)
        for head in (first, second)
    ]
    for head, optimizer in zip((first, second), optimizers, strict=True):
        backward(backbone, head)
        assert moved(head.weight, optimizer)


def test_clipping_by_hand_is_refused_where_it_would_do_nothing():
    layer = linear()
    optimizer = sgd(layer.parameters(), fp32_grad_acc=True)
    clip_grad_norm(layer.parameters(), 1.0)  # there is no gradient yet
    backward(layer)
    optimizer.synchronize_gradients()
    with pytest.raises(ParallelConfigError, match="set max_grad_norm"):
        clip_grad_norm(layer.parameters(), 1.0)


def test_master_weights_follow_replaced_memory():
    layer = linear()
    optimizer = sgd(layer.parameters(), lr=0.0, master_weights=True)
    layer.weight.data = torch.full((4, 4), 0.125, dtype=BF16)
    backward(layer)
    optimizer.step()
    assert torch.equal(layer.weight, torch.full((4, 4), 0.125, dtype=BF16))
    memory = bytearray(32)
    for value in (0.5, 0.25):  # the second is other memory at the same address, as an allocator may give it
        torch.frombuffer(memory, dtype=BF16).fill_(value)
        layer.weight.data = torch.frombuffer(memory, dtype=BF16).view(4, 4)
        optimizer.step()
    assert torch.equal(layer.weight, torch.full((4, 4), 0.25, dtype=BF16))
