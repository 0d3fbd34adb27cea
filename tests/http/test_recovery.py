"""How long lost ranks may take to be ready again, and what is told meanwhile: with numbers in place of ranks."""

from __future__ import annotations

import pytest

from nxd_infer.runtime.time_bounds import again
from nxd_server.app.recovery_timeout import RecoveryTimeout

GIB = 2**30


@pytest.mark.check
@pytest.mark.parametrize(("start", "nbytes"), [(14.2, 6 * GIB), (90.0, 60 * GIB), (2.0, GIB // 2)])
def test_the_bound_leaves_room_for_a_machine_that_is_busy_and_a_disk_that_is_slow(start, nbytes):
    subject = RecoveryTimeout(None, nbytes)
    subject.took(start)
    assert subject.limit == 2 * again(start, nbytes) >= max(60.0, 12 * start), "two starts may be as slow as can be"
    assert not subject.hopeless(start)


@pytest.mark.check
def test_a_start_that_was_slow_once_may_be_so_again():
    subject = RecoveryTimeout(None)
    subject.took(20.0)
    before = subject.limit
    subject.took(9.0)
    assert subject.limit == before and "of about 9 s" in subject.progress(3.0, "the ranks load")
    subject.took(30.0)
    assert subject.limit == 360.0


@pytest.mark.check
@pytest.mark.parametrize("seconds", [5.0, 600.0])
def test_a_setting_raises_and_lowers_the_bound(seconds):
    subject = RecoveryTimeout(seconds, 6 * GIB)
    subject.took(4.0)
    assert subject.limit == seconds and not subject.hopeless(4.0)


@pytest.mark.check
def test_a_bound_that_must_fail_is_told_with_the_way_out():
    subject = RecoveryTimeout(5.0, 6 * GIB)
    subject.took(9.0)
    told = subject.hopeless(8.0)
    assert "recovery_timeout is 5 s" in told and "take 8.0 s to load" in told and "leave it out" in told


@pytest.mark.check
def test_how_far_it_is():
    subject = RecoveryTimeout(None)
    subject.took(9.0)
    assert subject.progress(3.2, "the ranks load") == (
        "starting the ranks again: the ranks load, 3 s of about 9 s (at most 108 s)"
    )
    assert "within 108 s" in subject.late("a first step runs") and "recovery_timeout higher" in subject.late("")
