"""When lost ranks are started again, and how far that is."""

from __future__ import annotations

import time


class Restarts:
    """At most ``limit`` restarts within ``window`` seconds; some are excused and do not count."""

    def __init__(self, limit: int, window: float):
        self.count = 0
        """All of them, since the engine was made."""
        self.hopeless = ""
        """Why ranks are not started again at all, whatever the limit: whoever bounds a restart has seen that it could
        not be in time."""
        self.stage = ""
        """What is waited for now."""
        self._limit, self._window = limit, window
        self._recent: list[float] = []
        self._begun: float | None = None

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

    def begin(self, excused: bool) -> str:
        """Count a restart; which one it is, as text."""
        self._begun, self.stage, self.count = time.monotonic(), "the ranks load", self.count + 1
        if excused:
            return "not counted"
        self._recent.append(self._begun)
        return f"{len(self._recent)} of {self._limit} times in {self._window:g} s"

    def end(self) -> None:
        """The restart is over, whatever came of it."""
        self._begun, self.stage = None, ""

    @property
    def seconds(self) -> float | None:
        """How long the restart in progress has taken; None when there is none."""
        begun = self._begun
        return None if begun is None else time.monotonic() - begun
