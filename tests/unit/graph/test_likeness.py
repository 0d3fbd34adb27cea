"""What code could tell apart is unlike, and what nobody knows how to compare."""

from __future__ import annotations

import enum
import threading
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from nxd_infer.graph.likeness import alike


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass(slots=True)
class Slots:
    a: Any


class Named(OrderedDict):
    pass


class Kind(enum.Enum):
    A = 1
    B = 2


def adds(value: Any) -> Any:
    return lambda x, more=value: x + value + more


def ring() -> list[Any]:
    found: list[Any] = [1]
    found.append(found)
    return found


def net(size: int = 3, act: Any = nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Linear(2, size), act(), nn.Linear(size, 2))


def tied(names: int) -> nn.Module:
    module = nn.Module()
    weights = [nn.Parameter(torch.randn(2)) for _ in range(2)]
    module.a, module.b, module.c = weights[0], weights[0 if names > 1 else 1], weights[0 if names > 2 else 1]
    return module


def hooked(value: int, kwargs: int = 2) -> nn.Module:
    """``kwargs``: which hook takes named arguments."""
    module = nn.Linear(2, 2)
    for i, added in enumerate((1, value, 3)):
        module.register_forward_pre_hook(adds(added), with_kwargs=i == kwargs)
    return module


T = torch.arange(12.0)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (1, 1, True),
        (1, True, False),
        (1, 1.0, False),
        (0.0, -0.0, False),
        (float("nan"), float("nan"), True),
        ({"a": [1, (2, "x")]}, {"a": [1, (2, "x")]}, True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),
        (defaultdict(list), defaultdict(dict), False),
        (deque([1, 2]), deque([1, 3]), False),
        (Named(a=1), Named(a=1), True),
        (Named(a=1), Named(a=2), False),
        ({1, 2}, {2, 1}, True),
        (Pair(1, T), Pair(1, T + 1), True),
        (Slots(1), Slots(1), True),
        (Slots(1), Slots(2), False),
        (Kind.A, Kind.B, False),
        (SimpleNamespace(a=1), SimpleNamespace(a=1), False),  # a class of C
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
        (tied(1), tied(2), False),
        (hooked(1), hooked(1), True),
        (hooked(1), hooked(2), False),
        (hooked(1), hooked(1, 1), False),
        (hooked(1), hooked(1, 3), False),
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
    assert alike(first, first) is not None


def test_pairs_are_the_tensors_at_equal_places_and_each_once():
    first, second = ({"a": [x, x], "b": adds(x)} for x in (torch.zeros(2), torch.ones(2)))
    pairs = alike(first, second)
    assert pairs is not None and len(pairs) == 1
    assert pairs[0][0] is first["a"][0] and pairs[0][1] is second["a"][0]
    assert alike(first, {**second, "a": [torch.ones(2), torch.ones(2)]}) is None


def test_what_is_free_is_not_read_nor_whether_it_is_there():
    assert alike([Slots(1)], [Slots(2)], (Slots,)) == []
    assert alike([Slots(1)], [None], (Slots,)) == alike([None], [Slots(1)], (Slots,)) == []
    assert alike([Slots(1)], [1], (Slots,)) is None
    own = Slots(1)
    assert alike([own, own], [Slots(1), Slots(1)], (Slots,)) is None
