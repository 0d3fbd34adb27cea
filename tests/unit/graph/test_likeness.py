"""What code could tell apart is unlike, and what nobody knows how to compare."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from nxd_infer.graph.repeats import alike


class Pair(NamedTuple):
    a: Any
    b: Any


class Hides:
    def __init__(self, value: int):
        self.value = value

    def __getstate__(self) -> dict[str, Any]:
        return {}


def adds(value: Any) -> Any:
    return lambda x, more=value: x + value + more


def ring() -> list[Any]:
    values: list[Any] = [1]
    values.append(values)
    return values


def net(size: int = 3, act: Any = nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Linear(2, size), act(), nn.Linear(size, 2))


def tied(names: int) -> nn.Module:
    module = nn.Module()
    weights = [nn.Parameter(torch.randn(2)) for _ in range(2)]
    module.a, module.b, module.c = weights[0], weights[0 if names > 1 else 1], weights[0 if names > 2 else 1]
    return module


T = torch.arange(12.0)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (1, True, False),
        (1, 1.0, False),
        (0.0, -0.0, False),
        (float("nan"), float("nan"), True),
        ({"a": [1, (2, "x")]}, {"a": [1, (2, "x")]}, True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),
        (OrderedDict(a=1), OrderedDict(a=2), False),
        (Pair(1, T), Pair(1, T + 1), True),
        (Hides(1), Hides(1), False),
        (threading.Lock(), threading.Lock(), False),
        (adds(1), adds(1), True),
        (adds(1), adds(2), False),
        (adds(T), adds(T + 1), True),
        (ring(), ring(), True),
        (net(), net(), True),
        (net(), net(4), False),
        (net(), net(act=nn.Tanh), False),
        (net().forward, net().forward, True),
        (tied(2), tied(2), True),
        (tied(2), tied(3), False),
        (T, T.double(), False),
        (T[:6].view(2, 3), T[:6].view(3, 2).t(), False),
        (T[1:3], T[2:4], False),
        (T[:3], nn.Parameter(T[:3]), False),
        ([T[:6], T[:6].view(2, 3)], [T[:6], T[:6].clone().view(2, 3)], False),  # one memory, or two
        ([T[:6], T[:6].view(2, 3)], [T[:6].clone()] * 2, False),
    ],
)
def test_likeness(first, second, same):
    assert (alike(first, second) is not None) == same
    assert (alike(second, first) is not None) == same
