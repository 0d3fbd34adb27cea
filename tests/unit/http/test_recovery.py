"""How long lost ranks may take to be ready again, and what is told meanwhile: with numbers in place of ranks."""

from __future__ import annotations

import pytest

from nxd_infer.runtime.time_bounds import Bounds, again
from nxd_server.engine.rank_restarts import RecoveryTimeout

GIB = 2**30


def after(load: float, rest: float = 0.0, nbytes: int = 0, setting: float | None = None) -> RecoveryTimeout:
    """Of ranks that loaded in ``load`` seconds, and answered ``rest`` seconds later."""
    bounds = Bounds([], nbytes, 10.0)
    bounds.loaded(load)
    subject = RecoveryTimeout(setting)
    subject.started(load + rest, bounds)
    return subject


@pytest.mark.parametrize(("start", "nbytes"), [(14.2, 6 * GIB), (90.0, 60 * GIB), (2.0, GIB // 2)])
def test_the_bound_leaves_room_for_a_machine_that_is_busy_and_a_disk_that_is_slow(start, nbytes):
    subject = after(start, nbytes=nbytes)
    assert subject.limit == 2 * again(start, nbytes) >= max(60.0, 12 * start), "two starts may be as slow as can be"
    assert after(start, nbytes=nbytes, setting=5.0).limit == 5.0


def test_a_start_that_was_slow_once_may_be_so_again():
    subject = after(15.0, 5.0)
    before = subject.limit
    assert before == pytest.approx(2 * (6 * 15.0 + 6 * 5.0))
    subject.took(9.0)
    assert subject.limit == before
    subject.took(30.0)  # new weights were swapped in since
    assert subject.limit == pytest.approx(2 * (6 * 15.0 + 6 * 15.0))


def test_how_far_it_is():
    subject = after(9.0)
    assert subject.progress(3.2, "the ranks load") == (
        "starting the ranks again: the ranks load, 3 s of about 9 s (at most 108 s)"
    )
    assert "within 108 s" in subject.late("a first step runs") and "recovery_timeout higher" in subject.late("")
