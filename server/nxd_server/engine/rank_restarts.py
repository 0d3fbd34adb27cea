"""When lost ranks are restarted, the progress of a restart, and how long it may take."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from nxd_infer.errors import (
    CollectiveError,
    ModelClosedError,
    RankDiedError,
    RankFailedError,
    RankStartError,
    RankTimeoutError,
)
from nxd_infer.runtime.time_bounds import MARGIN, Bounds
from nxd_server.errors import forget_frames, log_failure, summary

log = logging.getLogger("nxd_server.engine")

LONGEST_PAUSE = 8.0
"""Most seconds between two attempts to start ranks for which the system has no room."""
RECOVERY_STARTS = 2
"""Starts of maximum length that a recovery allows: ranks that hang during the first are noticed at its end, and are
started once more."""


class RankRestarts:
    """At most ``limit`` restarts within ``window`` seconds; excused ones do not count.

    A recovery begins with a restart and ends when the ranks are ready or the engine ends. Ranks that are lost again
    before that are restarted within the same recovery, and so are ranks for which the system has no room now: that does
    not count if something else bounds the recovery (``bounded``).
    """

    def __init__(self, limit: int, window: float):
        self.count = 0
        """All restarts since the engine was created."""
        self.bounded = False
        self.stage = ""
        """What the recovery is waiting for now."""
        self.took: float | None = None
        """Seconds of the last successful restart, without the failed ones before it."""
        self._limit, self._window = limit, window
        self._recent: list[float] = []
        self._begun: float | None = None
        self._latest = 0.0
        self._attempt = 0

    def another(self) -> RankRestarts:
        """Return the same limit for other ranks."""
        return RankRestarts(self._limit, self._window)

    def refusal(self, excused: bool) -> str:
        """Return why the ranks may not be restarted now, with the fix; "" if they may."""
        if self._limit == 0:
            return "max_restarts is 0: with more, ranks that are lost are started again"
        now = time.monotonic()
        self._recent = [moment for moment in self._recent if now - moment < self._window]
        if excused or len(self._recent) < self._limit:
            return ""
        return (
            f"they have been started again as often as max_restarts allows ({self._limit} in {self._window:g} s): see "
            "in the log why they end"
        )

    def run(self, start: Callable[[], None], excused: bool, ending: Callable[[], str]) -> tuple[Exception, str] | None:
        """Recover: call ``start``, and again if the ranks are lost in it, while that is allowed. Return None once they
        are ready; else the last error and its explanation, including why there is no further restart if one might help.

        ``excused``: the first restart does not count; ``ending``: returns why no further restart should be made.
        """
        while True:
            log.info("starting the ranks again (%s)", self._begin(excused))
            try:
                start()
            except Exception as error:
                lost = lost_again(error)
                if lost is None:
                    return error, summary(error) or type(error).__name__
                no_room = isinstance(lost, RankStartError)
                excused = no_room and self.bounded
                if no_room:
                    self._pause(ending)
                if why := ending() or self.refusal(excused):
                    return lost, f"{summary(lost)}; {why}"
                log_failure(log, "the ranks failed while they were started again", lost)
                forget_frames(error)
            else:
                self.took = time.monotonic() - self._latest
                return None

    def _pause(self, ending: Callable[[], str]) -> None:
        """Wait for what the system lacks, longer each time."""
        end = time.monotonic() + min(self._attempt, LONGEST_PAUSE)
        while time.monotonic() < end and not ending():
            time.sleep(0.1)

    def _begin(self, excused: bool) -> str:
        """Count a restart of the current or a new recovery; return its number for the log."""
        self._latest, self.count = time.monotonic(), self.count + 1
        self._attempt = 1 if self._begun is None else self._attempt + 1
        self._begun = self._begun or self._latest
        self.at("the ranks load")
        if excused:
            return "not counted"
        self._recent.append(self._latest)
        return f"{len(self._recent)} of {self._limit} times in {self._window:g} s"

    def at(self, stage: str) -> None:
        """Record the ``stage`` that the restart has reached."""
        self.stage = stage if self._attempt == 1 else f"{stage} (attempt {self._attempt})"

    def end(self) -> float:
        """End the recovery, successful or not; return its duration in seconds."""
        seconds = self.seconds or 0.0
        self._begun, self.stage = None, ""
        return seconds

    @property
    def seconds(self) -> float | None:
        """Seconds since the current recovery began; None without one."""
        begun = self._begun
        return None if begun is None else time.monotonic() - begun


class RecoveryTimeout:
    """How long lost ranks may take to be ready again, and the progress of that.

    ``setting`` is ``recovery_timeout``; None derives the limit from the time of the start on this machine, once
    :meth:`started` has been called.
    """

    def __init__(self, setting: float | None):
        self.expected: float | None = None
        """Seconds that the last start or recovery took."""
        self._setting = setting
        self._bounds: Bounds | None = None
        self._after_load = 0.0

    def started(self, seconds: float, bounds: Bounds) -> None:
        """The first start took ``seconds``; ``bounds`` knows what the ranks take to load."""
        self._bounds = bounds
        self.took(seconds)

    def took(self, seconds: float) -> None:
        """The ranks became ready again in ``seconds``."""
        self.expected = seconds
        load = self._bounds and self._bounds.load_seconds
        self._after_load = max(self._after_load, seconds - (load or 0.0))

    @property
    def limit(self) -> float:
        """Seconds after which the server gives up on ranks that are not ready again. Derived: two starts, each within
        the limit of a load, and what else they do until they are ready, which are swaps and the first steps."""
        if self._setting is not None:
            return self._setting
        if self._bounds is None:
            return math.inf
        return RECOVERY_STARTS * (self._bounds.load + MARGIN * self._after_load)

    def progress(self, seconds: float, stage: str) -> str:
        """Describe the progress of a recovery that began ``seconds`` ago."""
        about = "" if self.expected is None else f" of about {self.expected:.0f} s"
        return f"starting the ranks again: {stage}, {seconds:.0f} s{about} (at most {self.limit:.0f} s)"

    def late(self, stage: str) -> str:
        """Return the message for a recovery that took too long."""
        about = "" if self.expected is None else f" (the last start took {self.expected:.1f} s; now {stage})"
        return (
            f"the ranks were not ready again within {self.limit:g} s{about}: see what else runs on this machine, or "
            "set recovery_timeout higher"
        )


def lost_again(error: Exception) -> Exception | None:
    """Return what ended the ranks during their start, if another start may help; else None: the model was closed, or
    its files do not match, or the system does not let them start for good."""
    if isinstance(error, ModelClosedError):  # raised by a later call; the cause is the real error
        error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    if isinstance(error, RankFailedError):
        return None if error.foreseen else error
    if isinstance(error, RankStartError):
        return error if error.passing else None
    lost = (RankDiedError, RankTimeoutError, CollectiveError, ConnectionError)
    return error if isinstance(error, lost) else None
