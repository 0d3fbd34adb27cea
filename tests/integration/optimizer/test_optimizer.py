"""The optimizer wrapper and ZeRO-1: what users of a torch.optim.Optimizer expect, precision, NaN gradients, state."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer import comm, parallel_state
from nxd_infer.context import current_context
from nxd_infer.errors import NonFiniteGradientError, ParallelConfigError
from nxd_infer.optimizer import NeuronZero1Optimizer, NxDOptimizer
from nxd_infer.parallel_layers.grads import allreduce_sequence_parallel_gradients
from tests.support.ranks import run_ranks
from tests.support.trainer.jobs import ZERO1, AdamW, mine, training
from tests.support.trainer.models import MLP, decoder, llama, mlp, tokens, vectors

# --- it is a torch.optim.Optimizer --------------------------------------------------------------------------


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
    loose = NxDOptimizer([nn.Parameter(torch.ones(1))], AdamW)
    assert loose.names == ["group 0 parameter 0"]


def test_refused_parameters():
    with pytest.raises(ValueError, match="empty parameter list"):
        NxDOptimizer([], AdamW)
    with pytest.raises(TypeError, match="not one tensor"):
        NxDOptimizer(nn.Parameter(torch.ones(1)), AdamW)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ParallelConfigError, match='on_nonfinite must be "raise" or "skip"'):
        NxDOptimizer([nn.Parameter(torch.ones(1))], AdamW, on_nonfinite="hope")
    with pytest.raises(TypeError, match="learning"):
        NxDOptimizer([nn.Parameter(torch.ones(1))], AdamW, defaults={"learning": 1})
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer = NxDOptimizer([nn.Parameter(torch.ones(1)), frozen], AdamW)
    frozen.requires_grad_()
    (frozen * 2).sum().backward()
    with pytest.raises(ParallelConfigError, match="frozen when the optimizer was created"):
        optimizer.step()


# --- gradients that are no numbers --------------------------------------------------------------------------


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


NAMES = ("model.layers.1.mlp.down_proj.weight",)


def test_nonfinite_gradients_in_one_process():
    assert poisoned(False) == poisoned(True) == [NAMES, 1]


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


def test_huge_finite_gradients_are_clipped():
    param = nn.Parameter(torch.zeros(2))
    optimizer = NxDOptimizer([param], torch.optim.SGD, defaults={"lr": 1.0})
    param.grad = torch.tensor([3e30, 4e30])
    optimizer.step()
    assert torch.allclose(param.detach(), torch.tensor([-0.6, -0.8]))


# --- precision ----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("zero1", [False, True])
def test_master_weights(zero1: bool):
    check_low_precision(low_precision(zero1))


@pytest.mark.parametrize("zero1", [False, True])
def test_master_weights_over_ranks(zero1: bool):
    for found in run_ranks(low_precision, 2, zero1, tp=1):
        check_low_precision(found)


def test_gradients_are_summed_in_float32():
    for accumulate in (False, True):
        param = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        optimizer = NxDOptimizer(
            [param], torch.optim.SGD, master_weights=True, fp32_grad_acc=accumulate, defaults={"lr": 1.0}
        )
        for value in [256.0] + [1.0] * 64:  # each 1 is below the resolution of bfloat16 at 256
            (param * value).sum().backward()
        assert float(optimizer.named_gradients()["group 0 parameter 0"]) == (320 if accumulate else 256)


def test_masters_follow_weights_that_are_loaded_later():
    model, optimizer = training(
        partial(decoder, "llama", torch.bfloat16), mixed_precision_config={"use_master_weights": True}
    )
    other = {name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}
    model.load_state_dict(other)
    model.run_train(**tokens())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert all(torch.equal(value, other[name]) for name, value in model.state_dict().items())


# --- data parallelism ---------------------------------------------------------------------------------------


def overlapping() -> dict[str, Any]:
    """When buckets are reduced, and what a step without gradients of some parameters does."""
    found: dict[str, Any] = {}
    parallel_state.destroy_model_parallel()
    model, optimizer = training(mlp, optimizer_config={"zero_one_enabled": True, "bucket_cap_mb": 0.001})
    reducer = optimizer._reducer
    found["buckets"] = len(reducer.buckets)
    for _ in range(2):
        model.run_train(**mine(vectors()))
        found.setdefault("in backward", []).append(sum(bucket.pending is not None for bucket in reducer.buckets))
        optimizer.step()
        optimizer.zero_grad()
    unused = model.unused.detach().clone()
    found["unused"] = torch.equal(unused, torch.ones(3)) and model.unused.grad is None
    for _ in range(2):
        launched = []
        for part in range(2):
            rows = {key: value[part : part + 1] for key, value in mine(vectors()).items()}
            model.run_train(**rows)
            launched.append(sum(bucket.pending is not None for bucket in reducer.buckets))
        optimizer.step()
        optimizer.zero_grad()
        found.setdefault("launched", []).append(launched)
    # An optimizer that replaces another takes its hooks over.
    former = reducer
    _, again = training(mlp)
    del again
    NxDOptimizer(model.parameters(), AdamW)
    model.run_train(**mine(vectors()))
    found["former"] = sum(bucket.pending is not None for bucket in former.buckets)
    return found


def test_buckets_are_reduced_during_the_backward():
    for found in run_ranks(overlapping, 2, tp=1):
        # The bucket with the unused parameter waits for the end of the backward.
        assert found["in backward"] == [found["buckets"]] * 2 and found["buckets"] > 3
        assert found["unused"]
        # The first step of two passes reduces in the first of them, the next one in the second.
        assert found["launched"][0][0] > 0 and found["launched"][1] == [0, found["launched"][0][0]]
        assert found["former"] == 0


def unequal_ranks() -> dict[str, Tensor]:
    """Ranks that do different things between backward and step still agree on what is reduced."""
    model, optimizer = training(mlp, optimizer_class=torch.optim.SGD)
    model.run_train(**mine(vectors()))
    if current_context().rank == 1:
        model.run_train(**mine(vectors()))  # a second pass, on one rank only
    optimizer.step()
    optimizer.zero_grad()
    if current_context().rank == 0:
        (model.unused * 2).sum().backward()  # and a parameter that only this rank uses
    model.run_train(**mine(vectors()))
    optimizer.step()
    return model.state_dict()


def test_ranks_that_differ():
    first, second = run_ranks(unequal_ranks, 2, tp=1)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["unused"], torch.ones(3))


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


def clipped_by_hand() -> float:
    """Gradients are final after synchronize_gradients(): clipping by hand is what the wrapper does itself."""
    results = []
    for by_hand in (True, False):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(2)
        model, optimizer = training(
            llama,
            sequence_parallel=True,
            optimizer_class=torch.optim.SGD,
            optimizer_config={"grad_clipping": not by_hand, "max_grad_norm": 0.1},
        )
        for _ in range(2):
            model.run_train(**mine(tokens()))
            if by_hand:
                optimizer.synchronize_gradients()
                optimizer.synchronize_gradients()  # twice is once
                nxd.parallel_layers.clip_grad_norm(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return float((results[0] - results[1]).abs().max())


def test_clipping_by_hand():
    assert max(run_ranks(clipped_by_hand, 4)) < 1e-7


def summed_without_the_wrapper() -> list[float]:
    """allreduce_sequence_parallel_gradients gives a plain optimizer what the wrapper has."""
    model, optimizer = training(llama, sequence_parallel=True)
    model.run_train(**tokens())
    allreduce_sequence_parallel_gradients(torch.optim.SGD(model.parameters(), lr=1.0))
    mine_ = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.zero_grad()
    model.run_train(**tokens())
    whole = optimizer.named_gradients()
    return [float((whole[name] - grad).abs().max()) for name, grad in mine_.items()]


def test_sequence_parallel_gradients_without_the_wrapper():
    for gaps in run_ranks(summed_without_the_wrapper, 2):
        assert max(gaps) < 1e-7
