"""How long lost ranks may take to be ready again: from what starting them has taken on this machine.

There is time for two starts, each as long as one may take: ranks that hang while they start are noticed at the end of
the first, and started once more.
"""

from __future__ import annotations

from nxd_infer.runtime.time_bounds import again

STARTS = 2


class RecoveryTimeout:
    """The bound of a recovery, and how far one is.

    ``setting`` is ``recovery_timeout``; None derives the bound, once :meth:`took` has told what a start takes.
    """

    def __init__(self, setting: float | None, nbytes: int = 0):
        self.nbytes = nbytes
        """Of the weights: they may have to be read from disk."""
        self.expected: float | None = None
        """Seconds that the last start, or recovery, took."""
        self._setting = setting
        self._slowest = 0.0

    def took(self, seconds: float) -> None:
        """The ranks became ready in ``seconds``."""
        self.expected = seconds
        self._slowest = max(self._slowest, seconds)

    @property
    def limit(self) -> float:
        """Seconds after which ranks that are not ready again are given up."""
        return STARTS * again(self._slowest, self.nbytes) if self._setting is None else self._setting

    def hopeless(self, fastest: float) -> str:
        """Why no recovery would be in time, where the ranks cannot load in less than ``fastest`` seconds, and the way
        out; empty where one may be. What a first start took is no such bound: the next finds its files in memory."""
        if self.limit >= fastest:
            return ""
        return (
            f"recovery_timeout is {self.limit:g} s, and on this machine the ranks take {fastest:.1f} s to load; set "
            "it higher, or leave it out to have it derived"
        )

    def progress(self, seconds: float, stage: str) -> str:
        """How far a recovery is that began ``seconds`` ago."""
        about = "" if self.expected is None else f" of about {self.expected:.0f} s"
        return f"starting the ranks again: {stage}, {seconds:.0f} s{about} (at most {self.limit:.0f} s)"

    def late(self, stage: str) -> str:
        """What is told of one that took too long."""
        about = "" if self.expected is None else f" (the last start took {self.expected:.1f} s; now {stage})"
        return (
            f"the ranks were not ready again within {self.limit:g} s{about}: see what else runs on this machine, or "
            "set recovery_timeout higher"
        )
