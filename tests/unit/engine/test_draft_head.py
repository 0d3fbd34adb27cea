"""The hidden states that a head has not read yet, against one plain array."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

from nxd_server.engine.draft_head import _Read
from tests.support.engine.schedules import sequence


def taken(read, count, width):
    """Take the states of ``count`` more tokens, whose numbers are the tokens' places."""
    states = np.repeat(np.arange(read.end, read.end + count, dtype=np.float32)[:, None], width, 1)
    read.hidden.append(states)
    read.end += count


@pytest.mark.parametrize("seed", range(20))
def test_states_are_those_of_their_tokens_whatever_came_read_or_was_cut(seed):
    rng, read = random.Random(seed), _Read(sequence(1), 5, 5, 5)
    for _ in range(200):
        what = rng.random()
        if what < 0.5 or read.end == read.count:
            taken(read, rng.choice([1, 1, 2, 7]), 3)
        elif what < 0.8:
            start = rng.randrange(read.count, read.end + 1)
            wanted, size = np.arange(read.count, read.end)[start - read.count :], rng.randint(1, 9)
            assert read.states(start, size).shape == (len(wanted[:size]), 3)
            assert read.states(start, size)[:, 0].tolist() == wanted[:size].tolist()
        elif what < 0.9:
            count = read.count + (tokens := rng.randint(0, read.end - read.count))
            read.go_on(tokens)
            assert read.count == count
        else:
            count, end = read.count, read.end
            read.cut(at := rng.randint(max(5, count - 2), end + 2))
            assert (read.count, read.end) == (min(count, at), min(end, at))
        assert sum(map(len, read.hidden)) == read.end - read.count


def test_reading_some_of_many_states_copies_these_alone_and_frees_them():
    read = _Read(sequence(1), 0, 0, 0)
    for _ in range(8):
        taken(read, 128, 1024)
    tracemalloc.start()
    try:
        read.states(4, 32)
        assert tracemalloc.get_traced_memory()[1] < 33 * 1024 * 4
    finally:
        tracemalloc.stop()
    read.go_on(300)
    held = sum((states if states.base is None else states.base).nbytes for states in read.hidden)
    assert held <= 6 * 128 * 1024 * 4
