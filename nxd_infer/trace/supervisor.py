"""Drive the ranks of one model: one record to all, one answer from each, within a bounded time.

Whatever goes wrong first is *the* failure: a rank that raised, ended, or did not answer in time. Every rank is then
ended, and every later exchange raises ModelClosedError that says why.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import NoReturn

from nxd_infer.errors import ModelClosedError, NxdError, RankDiedError, RankFailedError, RankTimeoutError
from nxd_infer.trace.artifact import LoadedArtifact
from nxd_infer.trace.channel import Arena, ChannelClosed, Kind, Request, wait_readable
from nxd_infer.trace.health import RankHealth
from nxd_infer.trace.processes import RankProcesses

_GRACE = 0.5
"""Seconds to wait, after one rank's error, for the end of another rank that may have caused it."""

_live: weakref.WeakSet[Supervisor] = weakref.WeakSet()


class Supervisor:
    """Start, drive and end the ranks of ``artifact``. Not thread-safe: the model's lock serialises its callers."""

    def __init__(
        self,
        artifact: LoadedArtifact,
        *,
        threads: int,
        call_timeout: float,
        start_timeout: float,
        before_load: Callable[[], None] | None = None,
    ):
        """``before_load`` is called once the processes run and import torch; no rank reads the artifact before its end,
        or ever, when it raises."""
        self.degree = artifact.manifest.tp_degree
        self._before_load = before_load
        self.call_timeout = call_timeout
        self.start_timeout = start_timeout
        self.failure: NxdError | None = None
        """What ended the ranks, once something has."""
        self._processes = RankProcesses(
            artifact,
            threads=threads,
            # The caller's deadline comes first; this one frees ranks whose caller cannot end them.
            collective_timeout=max(1.5 * call_timeout, call_timeout + 5.0),
            on_exit=self._on_exit,
        )
        self._owner = os.getpid()
        self._sequence = 0
        self._waiting: set[int] = set()
        """Ranks that have not yet answered the exchange numbered ``_sequence``."""
        self._mutex = threading.RLock()
        self._closing = False

    @property
    def arena(self) -> Arena | None:
        return self._processes.arena

    def start(self) -> None:
        """Start every rank and wait until all have loaded their graphs.

        Raises RankFailedError (with the rank's traceback), RankDiedError or RankTimeoutError, or what
        ``before_load`` raises; no rank is left then.
        """
        _live.add(self)
        try:
            self._processes.start()
            if self._before_load is not None:
                self._before_load()
            self.exchange(Kind.START, timeout=self.start_timeout)
        except ModelClosedError as error:  # because of a rank's end, perhaps, that was noticed before the exchange
            self.close()
            raise self.failure or error from None
        except BaseException:
            self.close()
            raise

    # --- one exchange with all ranks ---

    def exchange(
        self,
        kind: Kind,
        bucket: int = 0,
        *,
        timeout: float | None = None,
        fds: list[int] | None = None,
        fatal: bool = True,
    ) -> None:
        """Send one record to every rank and wait for all answers; ``fds`` holds one descriptor a rank.

        The wait lasts at most ``timeout`` (default: call_timeout) seconds and leaves the interpreter to other threads.
        With ``fatal`` False a rank that raises leaves the ranks running.

        Raises RankFailedError, RankDiedError, RankTimeoutError (the ranks have been ended then), ModelClosedError.
        """
        seconds = self.call_timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        self.settle(deadline, seconds)
        self._sequence += 1
        self._waiting = set(range(self.degree))
        rank = 0
        try:
            for rank, channel in enumerate(self._processes.channels):
                channel.send_request(Request(kind, bucket, self._sequence), (fds[rank],) if fds else ())
        except ChannelClosed:
            self._lost(rank)
        except BaseException as error:  # some ranks have the record and some do not
            raise self.fail(ModelClosedError(f"a call was interrupted: {error!r}")) from error
        self._collect(deadline, seconds, kind.name.lower().replace("_", " "), fatal)

    def settle(self, deadline: float | None = None, seconds: float | None = None) -> None:
        """Wait out an exchange whose caller was interrupted, so that the arena is free."""
        self.check()
        if self._waiting:
            seconds = self.call_timeout if seconds is None else seconds
            self._collect(deadline or time.monotonic() + seconds, seconds, "interrupted call")

    def check(self) -> None:
        """Raise ModelClosedError unless the ranks are there to be called."""
        if os.getpid() != self._owner:
            raise ModelClosedError(
                f"the ranks of this model belong to process {self._owner}; "
                "a forked process must load the artifact itself"
            )
        if self.failure is not None:
            first = str(self.failure).splitlines()[0]
            raise ModelClosedError(
                f"the ranks of this model were ended because {first}; call restart() to start them again"
            ) from self.failure
        if self._closing:
            raise ModelClosedError("the model was closed; call restart() to start its ranks again")

    def _collect(self, deadline: float, seconds: float, what: str, fatal: bool = True) -> None:
        """Read answers until none is missing. The first error, end or lapse of time ends all ranks and is raised."""
        failures: dict[int, str] = {}
        channels = self._processes.channels
        while self._waiting:
            left = deadline - time.monotonic()
            by_fd = {channels[rank].fileno(): rank for rank in self._waiting}
            hurried = fatal and bool(failures)  # the others may wait for the one that failed
            readable = wait_readable(list(by_fd), min(left, _GRACE) if hurried else left)
            if not readable and hurried:
                break
            if not readable and time.monotonic() >= deadline:
                raise self._late(seconds, what)
            for fd in readable:
                rank = by_fd[fd]
                try:
                    answer = channels[rank].receive_response()
                except ChannelClosed:
                    self._lost(rank)
                if answer.sequence == self._sequence:
                    self._waiting.discard(rank)
                    if not answer.ok:
                        failures[rank] = answer.text
        if failures:
            error = _raised(failures, self.degree, what)
            raise self.fail(error) if fatal else error

    def _lost(self, rank: int) -> NoReturn:
        """A rank's end of the channel is gone: wait for its exit status, then end all and raise."""
        if self._closing:
            raise ModelClosedError("the model was closed during the call")
        self._processes.ended.wait(5.0)  # the following thread reports the first end, which ends the others
        raise self.fail(RankDiedError(f"rank {rank} of {self.degree} closed its channel and did not end", rank))

    def _late(self, seconds: float, what: str) -> NxdError:
        """The time is over: say who is missing and what it was doing, and end all ranks."""
        states = {rank: self._processes.state(rank) for rank in self._waiting}
        passed = {rank: self._processes.collectives(rank) for rank in self._waiting}
        stopped = [rank for rank in sorted(states) if states[rank] == "stopped"]
        rank = stopped[0] if stopped else min(passed, key=lambda r: (passed[r], r))
        details = "; ".join(
            f"rank {r} (pid {self._processes.pid(r)}) is {states[r]}"
            + (f", {passed[r]} collectives passed" if passed[r] else "")
            for r in sorted(states)
        )
        text = (
            f"rank {rank} of {self.degree} did not finish its {what} within {seconds:g} s ({details}); "
            "all ranks have been ended: raise call_timeout if the work is that long, or call restart()"
        )
        return self.fail(RankTimeoutError(text + self._processes.tail(rank), rank))

    # --- the end ---

    def fail(self, error: NxdError) -> NxdError:
        """Record ``error`` unless something failed before it, end every rank, and return the recorded one."""
        with self._mutex:
            if self.failure is None:
                self.failure = error
            failure = self.failure
        self._processes.kill()
        return failure

    def _on_exit(self, rank: int, text: str) -> None:
        if not self._closing and self.failure is None:
            self.fail(RankDiedError(f"rank {rank} of {self.degree} {text}", rank))

    def close(self) -> None:
        """End every rank. Safe to call twice, from any thread, and at interpreter exit."""
        if os.getpid() != self._owner:
            return
        self._closing = True
        self._processes.kill()
        _live.discard(self)

    def health(self) -> list[RankHealth]:
        """Every rank as it is now. Reads shared counters; disturbs nothing and takes no lock."""
        ranks = []
        for rank in range(self.degree):
            begun, finished, clock = self.arena.progress(rank) if self.arena is not None else (0, 0, 0)
            state = self._processes.state(rank)
            age = (time.monotonic_ns() - clock) / 1e9 if clock else None
            ranks.append(
                RankHealth(
                    rank=rank,
                    pid=self._processes.pid(rank),
                    alive=state != "ended",
                    state=state,
                    steps=finished,
                    collectives=self._processes.collectives(rank),
                    busy_seconds=age if age is not None and begun > finished else 0.0,
                    last_step_age=age,
                )
            )
        return ranks


def _raised(failures: dict[int, str], degree: int, what: str) -> RankFailedError:
    """The error for the lowest rank that raised, with its traceback."""
    rank, text = min(failures.items())
    last = text.strip().splitlines()[-1] if text.strip() else "no message"
    return RankFailedError(
        f"rank {rank} of {degree} raised during {what}: {last}\n--- traceback of rank {rank} ---\n{text}", rank, text
    )


@atexit.register
def _close_all() -> None:
    for supervisor in list(_live):
        supervisor.close()
