"""How long lost ranks may take to be ready again, and what is told meanwhile: with numbers in place of ranks."""

from __future__ import annotations

import pytest

from nxd_infer.runtime.time_bounds import Bounds, again
from nxd_server.app.recovery_timeout import RecoveryTimeout
from nxd_server.engine.core.step_costs import Graph, StepCosts

GIB = 2**30


def after(
    load: float, rest: float = 0.0, nbytes: int = 0, setting: float | None = None, start_timeout: float | None = None
) -> tuple[RecoveryTimeout, Bounds]:
    """Of ranks that loaded in ``load`` seconds, and answered ``rest`` seconds later."""
    bounds = Bounds([], nbytes, 10.0, start_timeout)
    bounds.loaded(load)
    bounds.least_load = load
    subject = RecoveryTimeout(setting)
    subject.started(load + rest, bounds, StepCosts([]))
    return subject, bounds


@pytest.mark.parametrize(("start", "nbytes"), [(14.2, 6 * GIB), (90.0, 60 * GIB), (2.0, GIB // 2)])
def test_the_bound_leaves_room_for_a_machine_that_is_busy_and_a_disk_that_is_slow(start, nbytes):
    subject, _ = after(start, nbytes=nbytes)
    assert subject.limit == 2 * again(start, nbytes) >= max(60.0, 12 * start), "two starts may be as slow as can be"
    assert not subject.hopeless()


def test_a_start_that_was_slow_once_may_be_so_again():
    subject, bounds = after(15.0, 5.0)
    before = subject.limit
    assert before == pytest.approx(2 * (6 * 15.0 + 6 * 5.0))
    subject.took(9.0)
    assert subject.limit == before and "of about 9 s" in subject.progress(3.0, "the ranks load")
    subject.took(30.0)  # new weights were swapped in since
    assert subject.limit == pytest.approx(2 * (6 * 15.0 + 6 * 15.0))
    bounds.loaded(20.0)
    assert subject.limit > 2 * (6 * 20.0 + 6 * 10.0)


def test_a_setting_raises_and_lowers_the_bound_and_one_that_must_fail_is_told_with_the_way_out():
    for seconds in (5.0, 600.0):
        subject, _ = after(4.0, nbytes=6 * GIB, setting=seconds, start_timeout=50.0)
        assert subject.limit == seconds and not subject.hopeless()
    subject, _ = after(8.0, 1.0, 6 * GIB, setting=5.0)
    told = subject.hopeless()
    assert "recovery_timeout is 5 s, and" in told and "take 8.0 s to start" in told and "leave it out" in told


def test_what_all_has_to_be_in_time():
    subject, bounds = after(4.0, setting=9.0)
    assert not subject.hopeless() and not subject.hopeless(4.9)
    assert "9 s, of which 5.1 s have passed" in subject.hopeless(5.1), "another start would be too late"
    bounds.least_swaps = 4.0
    assert not subject.hopeless()
    costs = StepCosts([Graph("decode", 1, 1), Graph("prefill", 1, 9)], {"decode": 1.5, "prefill": 70.0})
    subject.started(4.0, bounds, costs)
    assert "take 9.5 s to start, load and run a step" in subject.hopeless()
    derived, _ = after(4.0)
    assert not derived.hopeless() and "set recovery_timeout higher" in derived.hopeless(59.0)


def test_how_far_it_is():
    subject, _ = after(9.0)
    assert subject.progress(3.2, "the ranks load") == (
        "starting the ranks again: the ranks load, 3 s of about 9 s (at most 108 s)"
    )
    assert "within 108 s" in subject.late("a first step runs") and "recovery_timeout higher" in subject.late("")
