"""When lost ranks are started again, and how far that is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from nxd_infer.errors import CollectiveError, ModelClosedError, RankDiedError, RankFailedError, RankTimeoutError
from nxd_server.errors import forget_frames, log_failure, summary

log = logging.getLogger("nxd_server.engine")


class RankRestarts:
    """At most ``limit`` restarts within ``window`` seconds; some are excused and do not count.

    A recovery begins with a restart and ends with ranks that are ready, or with the engine: ranks that are lost once
    more before that are started again within the same recovery.
    """

    def __init__(self, limit: int, window: float):
        self.count = 0
        """All of them, since the engine was made."""
        self.hopeless = ""
        """Why ranks are not started again at all, whatever the limit: whoever bounds a recovery has seen that it could
        not be in time."""
        self.stage = ""
        """What is waited for now."""
        self.took: float | None = None
        """Seconds of the last restart after which the ranks were ready, without those before it that failed."""
        self._limit, self._window = limit, window
        self._recent: list[float] = []
        self._begun: float | None = None
        self._latest = 0.0
        self._attempt = 0

    def refusal(self, excused: bool) -> str:
        """Why the ranks may not be started again now, with the way out; empty when they may."""
        if self.hopeless:
            return self.hopeless
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
        """Recover: call ``start``, and again when the ranks are lost in it, while that is allowed. None when they are
        ready; else the last error, and what to say of it: why they are not started once more, where that might help.

        ``excused``: the first restart does not count; ``ending``: why there shall be no other one.
        """
        while True:
            log.info("starting the ranks again (%s)", self._begin(excused))
            try:
                start()
            except Exception as error:
                lost, excused = lost_again(error), False
                if lost is None:
                    return error, summary(error) or type(error).__name__
                if why := ending() or self.refusal(excused):
                    return lost, f"{summary(lost)}; {why}"
                log_failure(log, "the ranks failed while they were started again", lost)
                forget_frames(error)
            else:
                self.took = time.monotonic() - self._latest
                return None

    def _begin(self, excused: bool) -> str:
        """Count a restart, the first or another one of a recovery; which one it is, as text."""
        self._latest, self.count = time.monotonic(), self.count + 1
        self._attempt = 1 if self._begun is None else self._attempt + 1
        self._begun = self._begun or self._latest
        self.at("the ranks load")
        if excused:
            return "not counted"
        self._recent.append(self._latest)
        return f"{len(self._recent)} of {self._limit} times in {self._window:g} s"

    def at(self, stage: str) -> None:
        """The restart has come to ``stage``."""
        self.stage = stage if self._attempt == 1 else f"{stage} (attempt {self._attempt})"

    def end(self) -> float:
        """The recovery is over, whatever came of it; the seconds that it took."""
        seconds = self.seconds or 0.0
        self._begun, self.stage = None, ""
        return seconds

    @property
    def seconds(self) -> float | None:
        """How long the recovery in progress has taken; None when there is none."""
        begun = self._begun
        return None if begun is None else time.monotonic() - begun


def lost_again(error: Exception) -> Exception | None:
    """What ended ranks that were being started, where another start may help; None where it cannot: the model was
    closed, or its files do not fit."""
    if isinstance(error, ModelClosedError):  # noticed by the call after it
        error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    if isinstance(error, RankFailedError):
        return None if error.foreseen else error
    lost = (RankDiedError, RankTimeoutError, CollectiveError, ConnectionError)
    return error if isinstance(error, lost) else None
