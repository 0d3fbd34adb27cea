"""Loops in which something else touches what an optimizer trains: a scaler, a second optimizer, ``.data``, clipping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxd_infer.context import make_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.optimizer import NeuronZero1Optimizer, NxDOptimizer
from nxd_infer.parallel_layers import clip_grad_norm

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


def test_shared_parameters_outlive_the_second_optimizer():
    first, shared = linear(), linear()
    options: dict[str, Any] = {"master_weights": True, "fp32_grad_acc": True}
    optimizer = sgd([*first.parameters(), *shared.parameters()], **options)
    second: Any = sgd(shared.parameters(), **options)
    for _ in range(3):
        backward(first, shared)
        assert moved(shared.weight, optimizer)
        second = None
    second = sgd(shared.parameters(), lr=0.25)
    backward(first, shared)
    with pytest.raises(ParallelConfigError, match=r"shape \(4, 4\) in another place or dtype"):
        optimizer.step()
    assert moved(shared.weight, second)
