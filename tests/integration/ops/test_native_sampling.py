"""The native sampling operators against their references: the same tokens for every setting, the same bits anywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nxd_infer import native, ops
from tests.support.needs import needs_native
from tests.support.ops.native_sampling import KINDS, Draw, check, digest, plain

pytestmark = needs_native

VOCABULARIES = st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 500, 1000, 2049, 5000]))


@pytest.fixture(scope="module")
def library() -> Any:
    return native.load()


@pytest.mark.smoke
@settings(max_examples=40)
@given(
    st.integers(1, 40),
    VOCABULARIES,
    st.sampled_from(KINDS),
    st.sampled_from([20, 20, 0, 1, 130]),
    st.integers(0, 2**40),
)
def test_tokens_are_those_of_the_reference(library, rows, vocabulary, kind, top, seed):
    draw = Draw(seed)
    raw, wishes = draw.logits(rows, vocabulary, kind), draw.settings(rows)
    check(plain(library)(raw, *wishes, top), ops.sample_adjusted(raw, *wishes, top), raw)


@settings(max_examples=40)
@given(
    st.integers(1, 12), VOCABULARIES, st.sampled_from(KINDS), st.lists(st.booleans(), min_size=7), st.integers(0, 2**40)
)
def test_adjusted_tokens_are_those_of_the_reference(library, rows, vocabulary, kind, given_, seed):
    draw = Draw(seed)
    raw, wishes = draw.logits(rows, vocabulary, kind), draw.settings(rows)
    allowed, bias_ids, bias, counts, seen, slot, *penalties = draw.adjustments(rows, vocabulary)
    history = [counts if given_[1] else None, seen if given_[2] else None, slot]
    if given_[3]:
        history = [None if line is None else line[:rows].contiguous() for line in history[:2]] + [None]
    biases = [bias_ids, bias] if given_[4] else [None, None]
    rest = [p if given_[5] else None for p in penalties]
    adjustments = [allowed if given_[0] else None, *biases, *history, *rest]
    found = library.op("sample_adjusted")(raw, *wishes, 20, *adjustments)
    check(found, ops.sample_adjusted(raw, *wishes, 20, *adjustments), raw)


@settings(max_examples=20)
@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 30), st.integers(0, 2**40))
def test_tokens_are_remembered_as_by_the_reference(library, rows, steps, vocabulary, seed):
    draw = Draw(seed)
    _, _, _, counts, seen, slot, *_ = draw.adjustments(rows, vocabulary)
    ids = torch.randint(vocabulary, (rows, steps), generator=draw.generator)
    length = torch.randint(steps + 1, (rows,), generator=draw.generator)
    if seed % 2:
        slot[:] = slot[0]  # rows of one sequence
    slot = torch.where((length == 0) | (slot == rows + 1), rows + 1, slot)  # the last line is for idle rows
    length = torch.where(slot == rows + 1, 0, length)
    start = draw.of([0, 3], rows, torch.int64)
    step = (ids, draw.some(rows, steps, share=0.5), start, length, slot)
    expected = counts.clone(), seen.clone()
    ops.remember_tokens(*expected, *step)
    library.op("remember_tokens")(counts, seen, *step)
    assert torch.equal(counts[:-1], expected[0][:-1])
    assert torch.equal(seen[:-1], expected[1][:-1])


def test_a_row_depends_neither_on_threads_nor_on_its_batch(library):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = digest(library)
        torch.set_num_threads(2)
        assert digest(library) == one
    finally:
        torch.set_num_threads(before)
    draw = Draw(3)
    raw, wishes = draw.logits(40, 2049, "plain"), draw.settings(40)
    together = plain(library)(raw, *wishes, 20)
    for row in (0, 7, 39):
        alone = plain(library)(raw[row : row + 1], *(w[row : row + 1] for w in wishes), 20)
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a[0], b[row])


def test_a_real_vocabulary(library):
    """More blocks than a histogram has bins, and every way of truncating."""
    draw = Draw(11)
    for kind in ("plain", "peaked", "flat"):
        raw, wishes = draw.logits(8, 151_937, kind), draw.settings(8)
        wishes[0][:] = 1.0
        wishes[1][:4] = torch.tensor([0, 50, 3000, 100_000])
        check(plain(library)(raw, *wishes, 20), ops.sample_adjusted(raw, *wishes, 20), raw)


def test_strides_and_empty_batches(library):
    draw = Draw(5)
    wide, wishes = draw.logits(6, 300, "plain"), draw.settings(6)
    raw = wide[:, ::2]
    check(plain(library)(raw, *wishes, 20), ops.sample_adjusted(raw, *wishes, 20), raw)
    none, wishes = wide[:0], [w[:0] for w in wishes]
    history = [torch.zeros(3, 300, dtype=dtype) for dtype in (torch.int32, torch.bool)]
    slot = torch.zeros(0, dtype=torch.int64)
    for token, _, ids, _ in (
        plain(library)(none, *wishes, 20),
        library.op("sample_adjusted")(none, *wishes, 20, None, None, None, *history, slot, None, None, None),
    ):
        assert token.shape == (0,) and ids.shape == (0, 20)


def test_what_does_not_fit_is_refused(library):
    draw = Draw(6)
    raw, wishes = draw.logits(2, 40, "plain"), draw.settings(2)
    adjustments = draw.adjustments(2, 40)
    adjusted, remember = (library.op(name) for name in ("sample_adjusted", "remember_tokens"))
    sample = plain(library)
    with pytest.raises(RuntimeError, match="logits has dtype number"):
        sample(raw.double(), *wishes, 20)
    with pytest.raises(RuntimeError, match=r"top_k has .* expected .* shape \[2\]"):
        sample(raw, wishes[0], wishes[1][:1], *wishes[2:], 20)
    with pytest.raises(RuntimeError, match="not \\[rows, vocabulary\\]"):
        sample(raw[0], *wishes, 20)
    with pytest.raises(RuntimeError, match="top = -1"):
        sample(raw, *wishes, -1)
    adjustments[5] = torch.tensor([0, 4])
    with pytest.raises(RuntimeError, match="slot 4 is not one of 4"):
        adjusted(raw, *wishes, 20, *adjustments)
    for absent in (1, 2):
        with pytest.raises(RuntimeError, match="bias_ids and bias_values come together"):
            adjusted(raw, *wishes, 20, *(None if place == absent else x for place, x in enumerate(adjustments)))
    counts, seen = adjustments[3], adjustments[4]
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="token 40 is not one of 40"):
        remember(counts, seen, torch.tensor([[40]]), torch.tensor([[True]]), one, one, one)
