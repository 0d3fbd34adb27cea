"""Why the ranks of a model were ended: the typed errors, made of what is known of the ranks. Pure functions."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from nxd_infer.errors import (
    ModelClosedError,
    NxdError,
    RankDiedError,
    RankFailedError,
    RankStartError,
    RankTimeoutError,
)


@dataclass(frozen=True)
class LateRank:
    """What is known of a rank that has not answered in time."""

    pid: int | None
    state: str
    """``running``, ``stopped`` or ``ended``."""
    collectives: int
    """Collectives passed since the start; 0 if the transport does not count them."""
    output: str
    """The end of what it printed."""


# --- errors of one rank, for which all are ended ---


def raised(tracebacks: Mapping[int, str], degree: int, what: str) -> RankFailedError:
    """The error for the lowest rank that raised during ``what``, with its traceback."""
    rank, text = min(tracebacks.items())
    last = text.strip().splitlines()[-1] if text.strip() else "no message"
    return RankFailedError(
        f"rank {rank} of {degree} raised during {what}: {last}\n--- traceback of rank {rank} ---\n{text}", rank, text
    )


def raised_here(error: Exception, traceback: str) -> RankFailedError:
    """The error for the only rank of a model, which runs in this process, if it raised ``error``."""
    return RankFailedError(f"rank 0 of 1 raised: {error}", 0, traceback)


def died(rank: int, degree: int, how: str, output: str) -> RankDiedError:
    """The error for a rank whose process ended; ``how``: see :func:`ending`, ``output``: the end of what it printed."""
    return RankDiedError(f"rank {rank} of {degree} {how}{_last_output(rank, output)}", rank)


def ending(explanation: str, returncode: int | None) -> str:
    """How a process ended: ``explanation``, and what a cut file does to a process that has mapped it."""
    cut = returncode == -signal.SIGBUS
    return explanation + (" (a file that it has mapped was cut short or cannot be read)" if cut else "")


def silent(rank: int, degree: int) -> RankDiedError:
    """The error for a rank that answers no more, though its process was not seen to end."""
    return RankDiedError(f"rank {rank} of {degree} closed its channel and did not end", rank)


def late(waiting: Mapping[int, LateRank], degree: int, what: str, seconds: float, setting: str) -> RankTimeoutError:
    """The error for ranks that did not finish ``what`` within ``seconds``; ``setting`` allows more.

    It blames the first rank that is stopped, else the one that has passed the fewest collectives: the others wait for
    it there.
    """
    stopped = [rank for rank in sorted(waiting) if waiting[rank].state == "stopped"]
    rank = stopped[0] if stopped else min(waiting, key=lambda r: (waiting[r].collectives, r))
    details = []
    for r, one in sorted(waiting.items()):
        passed = f", {one.collectives} collectives passed" if one.collectives else ""
        details.append(f"rank {r} (pid {one.pid}) is {one.state}{passed}")
    text = (
        f"rank {rank} of {degree} did not finish its {what} within {seconds:g} s ({'; '.join(details)}); "
        f"all ranks have been ended: raise {setting} if the work is that long, or call restart()"
    )
    return RankTimeoutError(text + _last_output(rank, waiting[rank].output), rank)


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


def _last_output(rank: int, output: str) -> str:
    return f"\n--- last output of rank {rank} ---\n{output}" if output else ""


# --- errors of a call to ranks that cannot be called ---


def interrupted(error: BaseException) -> ModelClosedError:
    """The error for ranks of which some have a record and some do not."""
    return ModelClosedError(f"a call was interrupted: {error!r}")


def ended_because(failure: NxdError) -> ModelClosedError:
    """The error of a call after ``failure`` ended the ranks."""
    first = str(failure).splitlines()[0]
    return ModelClosedError(f"the ranks of this model were ended because {first}; call restart() to start them again")


def closed() -> ModelClosedError:
    """The error of a call after ``close``."""
    return ModelClosedError("the model was closed; call restart() to start its ranks again")


def closed_during_call() -> ModelClosedError:
    """The error of a call that ``close`` interrupted."""
    return ModelClosedError("the model was closed during the call")


def of_another_process(owner: int) -> ModelClosedError:
    """The error of a call in a process that was forked from ``owner``, which started the ranks."""
    return ModelClosedError(
        f"the ranks of this model belong to process {owner}; a forked process must load the artifact itself"
    )
