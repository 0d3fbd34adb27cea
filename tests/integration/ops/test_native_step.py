"""The bookkeeping of a step: the native operators do what their references do, to the bit."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nxd_infer import native
from nxd_infer.ops import FAKES, remember_last, step_rows
from tests.support.needs import needs_native

pytestmark = needs_native
SLOTS, VOCABULARY = 6, 50


def rows(seed: int) -> tuple:
    """Rows of several slots, some idle, some of unknown tokens, some with too large ones."""
    choose = random.Random(seed)
    B, S = choose.choice([1, 2, 5]), choose.choice([1, 1, 3])

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(choose.randrange(1 << 30))
        return torch.randint(low, high + 1, shape, generator=generator)

    last = integers(0, VOCABULARY - 1, SLOTS + 1) if choose.random() < 0.7 else None
    tokens = integers(-1, VOCABULARY + 1, B, S)
    table = integers(0, SLOTS - 1, B, 2)[:, :1]
    return tokens, integers(0, 3, B), integers(0, S, B), table, last, integers(-1, 4, B), VOCABULARY, SLOTS


@pytest.mark.smoke
@settings(max_examples=200)
@given(st.integers(0, 1 << 30))
def test_what_rows_are_fed(seed: int) -> None:
    given_rows = rows(seed)
    found = native.load().op("step_rows")(*given_rows)
    expected, like = step_rows(*given_rows), FAKES["step_rows"](*given_rows)
    assert all(map(torch.equal, found, expected))
    for a, b, c in zip(found, expected, like, strict=True):
        assert a.dtype == b.dtype == c.dtype and a.shape == c.shape and a.is_contiguous()


@settings(max_examples=200)
@given(st.integers(0, 1 << 30), st.booleans())
def test_what_is_remembered(seed: int, pieces: bool) -> None:
    torch.manual_seed(seed)
    B = 1 + seed % 6
    slot = torch.randint(0, SLOTS + 1, (B,)) if pieces else torch.randperm(SLOTS)[:B]
    token, start = torch.randint(0, VOCABULARY, (B,)), torch.randperm(B)
    expected, found = torch.zeros(SLOTS + 1, dtype=torch.int64), torch.zeros(SLOTS + 1, dtype=torch.int64)
    remember_last(expected, token, start, slot, SLOTS, pieces)
    native.load().op("remember_last")(found, token, start, slot, SLOTS, pieces)
    assert torch.equal(found[:SLOTS], expected[:SLOTS])  # the scratch line is meaningless


def test_what_cannot_be_is_refused() -> None:
    feed, remember = native.load().op("step_rows"), native.load().op("remember_last")
    one, table = torch.zeros(1, dtype=torch.int64), torch.tensor([[7]])
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="slot 7 is not one of 3"):
        feed(tokens, one, one + 1, table, torch.zeros(3, dtype=torch.int64), one, 5, 2)
    with pytest.raises(RuntimeError, match=r"tokens are \[rows, length\]"):
        feed(one, one, one, table, None, one, 5, 2)
    with pytest.raises(RuntimeError, match="start has dtype"):
        feed(tokens, one.float(), one, table, None, one, 5, 2)
    with pytest.raises(RuntimeError, match="slot 9 is not one of 3"):
        remember(torch.zeros(3, dtype=torch.int64), one, one, one + 9, 2, False)
