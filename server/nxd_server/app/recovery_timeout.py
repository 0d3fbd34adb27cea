"""How long lost ranks may take to be ready again, derived from the time of the start on this machine.

The limit allows two starts of maximum length: ranks that hang during the first are noticed at its end, and are
started once more.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nxd_infer.runtime.time_bounds import MARGIN, Bounds

if TYPE_CHECKING:
    from nxd_server.engine.core.step_costs import StepCosts

STARTS = 2


class RecoveryTimeout:
    """The limit of a recovery, and its progress.

    ``setting`` is ``recovery_timeout``; None derives the limit, once :meth:`started` has been called.
    """

    def __init__(self, setting: float | None):
        self.expected: float | None = None
        """Seconds that the last start or recovery took."""
        self._setting = setting
        self._bounds: Bounds | None = None
        self._costs: StepCosts | None = None
        self._after_load = 0.0

    def started(self, seconds: float, bounds: Bounds, costs: StepCosts) -> None:
        """The first start took ``seconds``; ``bounds`` and ``costs`` know what the ranks take to load and for steps."""
        self._bounds, self._costs = bounds, costs
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
        return math.inf if self._bounds is None else STARTS * (self._bounds.load + MARGIN * self._after_load)

    def hopeless(self, spent: float = 0.0) -> str:
        """Return why a recovery that has taken ``spent`` seconds cannot be in time with another start, and the fix;
        else "". The time of a first start is not what one needs: the next one finds its files in the page cache."""
        if self._bounds is None:
            return ""
        steps = self._costs.as_dict().values() if self._costs is not None else ()
        fastest = self._bounds.least_load + self._bounds.least_swaps + min(steps, default=0.0)
        if self.limit >= spent + fastest:
            return ""
        name = "the limit of a recovery" if self._setting is None else "recovery_timeout"
        past = f", of which {spent:.1f} s have passed" if spent else ""
        fix = "set recovery_timeout higher" + ("" if self._setting is None else ", or leave it out to have it derived")
        return (
            f"{name} is {self.limit:g} s{past}, and on this machine the ranks take {fastest:.1f} s to start, load and "
            f"run a step; {fix}"
        )

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
