"""Why ranks do not start or cannot be called: the errors that several parts of a model raise."""

from __future__ import annotations

import signal

from nxd_infer.errors import RankStartError, RankTimeoutError


def ending(explanation: str, returncode: int | None) -> str:
    """How a process ended: ``explanation``, and what a cut file does to a process that has mapped it."""
    cut = returncode == -signal.SIGBUS
    return explanation + (" (a file that it has mapped was cut short or cannot be read)" if cut else "")


def not_started(started: int, processes: int, seconds: float) -> RankTimeoutError:
    """The error for ranks of which some have no process after ``seconds``."""
    return RankTimeoutError(
        f"rank {started} did not finish its start within {seconds:g} s: {started} of {processes} processes run; "
        "importing torch takes longer: raise start_timeout, or call restart()",
        started,
    )


def not_let_start(error: OSError) -> RankStartError:
    """The error for ranks that the system, which raised ``error``, does not let start."""
    return RankStartError(
        f"the system does not let the ranks start ({error}): see its limits, of memory and of open files"
    )
