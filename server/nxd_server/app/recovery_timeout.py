"""How long lost ranks may take to be ready again, derived from the time of the start on this machine.

The limit allows two starts of maximum length: ranks that hang during the first are noticed at its end, and are
started once more.
"""

from __future__ import annotations

from nxd_infer.runtime.time_bounds import again

STARTS = 2


class RecoveryTimeout:
    """The limit of a recovery, and its progress.

    ``setting`` is ``recovery_timeout``; None derives the limit, once :meth:`took` has reported the time of a start.
    """

    def __init__(self, setting: float | None, nbytes: int = 0):
        self.nbytes = nbytes
        """Size of the weights, which may have to be read from disk."""
        self.expected: float | None = None
        """Seconds that the last start or recovery took."""
        self._setting = setting
        self._slowest = 0.0

    def took(self, seconds: float) -> None:
        """The ranks became ready in ``seconds``."""
        self.expected = seconds
        self._slowest = max(self._slowest, seconds)

    @property
    def limit(self) -> float:
        """Seconds after which the server gives up on ranks that are not ready again."""
        return STARTS * again(self._slowest, self.nbytes) if self._setting is None else self._setting

    def hopeless(self, fastest: float) -> str:
        """Return why no recovery can be in time, and the fix, if the ranks need at least ``fastest`` seconds to load;
        else "". The time of a first start is not such a bound: the next one finds its files in the page cache."""
        if self.limit >= fastest:
            return ""
        return (
            f"recovery_timeout is {self.limit:g} s, and on this machine the ranks take {fastest:.1f} s to load; set "
            "it higher, or leave it out to have it derived"
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
