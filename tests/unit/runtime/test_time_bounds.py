"""How long ranks may take, from what was measured: with numbers in place of ranks."""

from __future__ import annotations

import pytest
import torch

from nxd_infer.artifact.manifest import BucketSpec, InputSpec
from nxd_infer.errors import InputMismatchError
from nxd_infer.runtime.time_bounds import START_SECONDS, Bounds

ONE, FOUR, PROMPT = range(3)
GIB = 2**30


def bounds(nbytes=6 * GIB, call: float | None = 10.0, **options):
    """Of graphs that take 1, 4 and 512 tokens, and a mask that is as large for all of them."""
    mask = InputSpec.of("mask", torch.empty(1000))
    buckets = [
        BucketSpec(
            name=str(tokens),
            inputs=[InputSpec.of("tokens", torch.empty(tokens, dtype=torch.int64)), mask],
            outputs=[],
            graphs=["toy"],
        )
        for tokens in (1, 4, 512)
    ]
    return Bounds(buckets, nbytes, call, **options)


def test_a_first_start_is_bounded_by_its_bytes_and_new_weights_by_what_it_took():
    subject = bounds()
    assert START_SECONDS < subject.start < bounds(nbytes=60 * GIB).start
    assert subject.load == subject.start
    subject.loaded(8.0)
    assert 6 * 8.0 < subject.load < subject.start  # everything may have to be read from disk again
    subject.loaded(80.0)
    assert subject.load > 6 * 80.0
    small = bounds(nbytes=1000)
    small.loaded(0.01)
    assert small.load == pytest.approx(30.0, abs=0.1)
    for seconds in (20.0, 900.0):
        given = bounds(start_timeout=seconds)
        given.loaded(8.0)
        assert given.start == given.load == seconds


def test_a_call_may_take_ten_times_what_its_own_bucket_took():
    subject = bounds()
    subject.loaded(8.0)
    for bucket, seconds in ((ONE, 0.4), (PROMPT, 4.0)):
        subject.called(bucket, seconds)
    assert subject.call(ONE) == 10.0, "a step that is short hangs no longer because another one is long"
    assert subject.call(PROMPT) == 40.0
    subject.called(PROMPT, 2.0)
    assert 20.0 < subject.call(PROMPT) < 40.0, "one that was slow is forgotten by and by"
    subject.loaded(10.0)
    assert subject.call(PROMPT) > 60.0, "after a restart every graph may read its weights again"


@pytest.mark.parametrize(
    ("call", "options"), [(None, {}), (10.0, {"start_timeout": 20.0}), (250.0, {"start_timeout": 9000.0})]
)
def test_no_call_outlasts_the_bound_that_all_have(call, options):
    """Whose multiple is the patience of ranks for each other, which is set when they start."""
    subject = bounds(call=call, **options)
    found = [subject.call(PROMPT)]
    for seconds in (8.0, 800.0):
        subject.loaded(seconds)
        subject.called(ONE, seconds)
        found += [subject.call(ONE), subject.call(PROMPT)]
    assert max(found) <= subject.longest_call
    assert subject.longest_call >= 10 * subject.call_timeout, "a step that keeps to call_timeout has its ten times"


def test_a_graph_that_never_ran_may_take_as_much_more_as_it_has_more_input():
    """No slow first step is a hang, and no hang in a first step lasts as long as a start may."""
    subject = bounds()
    subject.loaded(8.0)
    subject.called(ONE, 0.4)
    assert subject.call(FOUR) == pytest.approx(10 * 4 * 0.4 + 6 * 8.0)
    subject.called(FOUR, 0.2)
    assert subject.call(PROMPT) == pytest.approx(10 * 128 * 0.2 + 6 * 8.0)
    subject.called(PROMPT, 4.0)


def test_a_first_call_may_take_as_long_as_a_first_start_and_the_setting_raises_and_lowers_that():
    """It may compile, or read every weight from disk."""
    subject = bounds(call=None)
    subject.loaded(8.0)
    assert subject.call(PROMPT) == subject.start == bounds().start
    assert subject.start < bounds(nbytes=60 * GIB, call=None).call(PROMPT)
    subject.called(PROMPT, 0.1)
    assert subject.call(PROMPT) == 30.0, "what follows is known"
    assert bounds(call=None, start_timeout=900.0).call(PROMPT) == 900.0
    for seconds in (10.0, 900.0):
        assert bounds(call=seconds).call(PROMPT) == seconds


@pytest.mark.parametrize("options", [{"call": 0}, {"call": float("nan")}, {"start_timeout": float("inf")}])
def test_a_setting_that_is_no_time_is_refused(options):
    with pytest.raises(InputMismatchError, match="_timeout must be a number of seconds above 0, got"):
        bounds(**options)
