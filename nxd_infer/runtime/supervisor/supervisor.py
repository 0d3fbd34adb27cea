"""Drive the ranks of one model: one record to all, one answer from each, within a time limit.

The first error is *the* failure: a rank that raised, ended, or did not answer in time. Then every rank is ended, and
every later exchange raises ModelClosedError with that cause.
"""

from __future__ import annotations

import atexit
import errno
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from nxd_infer.artifact.reader import LoadedArtifact
from nxd_infer.artifact.verified import stamps_file
from nxd_infer.errors import ModelClosedError, NxdError, RankDiedError, RankFailedError, RankTimeoutError
from nxd_infer.processes.child import END_SECONDS
from nxd_infer.runtime.ipc import Answers, Arena, ChannelClosed, Kind, Request, Side
from nxd_infer.runtime.ranks import RankHealth, Ranks, of_another_process
from nxd_infer.runtime.supervisor.rank_processes import RankProcesses, not_let_start
from nxd_infer.runtime.time_bounds import Bounds

_GRACE = 0.5
"""Seconds to wait, after one rank's error, for the end of another rank that may have caused it."""

_live: weakref.WeakSet[Supervisor] = weakref.WeakSet()


@dataclass(slots=True)
class Exchange:
    """A record that was sent to every rank, and the answers so far."""

    kind: Kind
    sequence: int
    waiting: set[int]
    """Ranks that have not answered yet; 0 stands for all if one process runs them."""
    tracebacks: dict[int, str] = field(default_factory=dict)
    """Those of the ranks that raised."""
    nanoseconds: int = 0
    """How long the slowest rank worked on it."""
    timeout: float = 0.0
    """Seconds that it may take, counted from when the caller starts waiting."""
    fatal: bool = True
    """Whether a rank that raises ends all."""

    @property
    def seconds(self) -> float:
        return self.nanoseconds / 1e9


class Supervisor(Ranks):
    """Starts, drives and ends the ranks of ``artifact``."""

    failure: NxdError | None = None

    def __init__(
        self,
        artifact: LoadedArtifact,
        *,
        threads: int,
        bounds: Bounds,
        before_load: Callable[[], None] | None = None,
    ):
        """``before_load`` is called while processes import torch; no rank reads the artifact before it
        returns, or at all if it raises."""
        self.degree = artifact.manifest.world_size
        self._before_load = before_load
        self.bounds = bounds
        self._processes = RankProcesses(
            artifact,
            threads=threads,
            # The limits in `bounds` are shorter; this one frees ranks whose caller cannot end them.
            collective_timeout=1.5 * max(bounds.longest_call, bounds.load),
            on_exit=self._on_exit,
        )
        self._owner = os.getpid()
        self._sequence = 0
        self._open: dict[int, Exchange] = {}
        """Unfinished exchanges by number, in order."""
        self._answers = Answers([])
        self._mutex = threading.RLock()
        self._closing = False

    @property
    def arena(self) -> Arena | None:
        return self._processes.arena

    @property
    def sides(self) -> Sequence[Side]:
        return self.arena.sides if self.arena is not None else ()

    @property
    def lead_cores(self) -> list[int]:
        """See RankModel."""
        return self._processes.lead_cores

    def start(self) -> None:
        """Start every rank and wait until all have loaded their graphs.

        Raises RankFailedError (with the rank's traceback), RankDiedError or RankTimeoutError, or what ``before_load``
        raises; then no rank is left.
        """
        _live.add(self)
        try:
            self._processes.start()
            if self._before_load is not None:
                self._before_load()
            self._processes.wait_started(self.bounds.load)
            self._answers = Answers(self._processes.channels)
            with stamps_file(self._processes.artifact.stamps) as fd:
                self.finish(self.begin(Kind.START, fds=[fd] * self.degree, timeout=self.bounds.load))
        except OSError as error:
            self.close()
            if not isinstance(error, NxdError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise not_let_start(error) from error
            raise
        except ModelClosedError as error:  # perhaps caused by a rank's end before the exchange
            self.close()
            raise self.failure or error from None
        except BaseException:
            self.close()
            raise

    # --- exchanges with all ranks ---

    def begin(
        self,
        kind: Kind,
        bucket: int = 0,
        side: int = 0,
        *,
        fds: Sequence[int] = (),
        timeout: float | None = None,
        fatal: bool = True,
    ) -> Exchange:
        """Send one record to every rank. Ranks handle records in order. ``timeout`` None: the model's call_timeout.

        Raises RankDiedError or ModelClosedError; then the ranks have been ended.
        """
        self.check()
        self._sequence += 1
        exchange = self._open[self._sequence] = Exchange(
            kind,
            self._sequence,
            waiting=set(range(self._processes.count)),
            timeout=timeout or self.bounds.call_timeout,
            fatal=fatal,
        )
        record = Request(kind, bucket, self._sequence, side).record()
        rank = 0
        try:
            for rank, channel in enumerate(self._processes.channels):
                channel.send(record, tuple(fds if self._processes.together else fds[rank : rank + 1]))
        except ChannelClosed:
            self._lost(rank)
        except BaseException as error:  # some ranks have the record and some do not
            failure = self.fail(ModelClosedError(f"a call was interrupted: {error!r}"))
            if isinstance(error, Exception):
                raise failure from error
            raise
        return exchange

    def finish(self, exchange: Exchange) -> None:
        """Wait until every rank has done ``exchange``, and everything begun before it. Releases the GIL.

        Raises RankFailedError, RankDiedError, RankTimeoutError (then the ranks have been ended), ModelClosedError.
        """
        if self.failure is not None and exchange is next(iter(self._open.values()), None):
            raise self.fail(self.failure)  # it ended the ranks while they were at this exchange
        self.check()
        while exchange.sequence in self._open:
            self._collect(next(iter(self._open.values())))

    def settle(self) -> None:
        self.check()
        while self._open:
            self._collect(next(iter(self._open.values())))

    def check(self) -> None:
        if os.getpid() != self._owner:
            raise of_another_process(self._owner)
        if self.failure is not None:
            first = str(self.failure).splitlines()[0]
            raise ModelClosedError(
                f"the ranks of this model were ended because {first}; call restart() to start them again"
            ) from self.failure
        if self._closing:
            raise ModelClosedError("the model was closed; call restart() to start its ranks again")

    def _collect(self, exchange: Exchange) -> None:
        """Read answers until ``exchange`` is complete. The first error, end or timeout ends all ranks and is
        raised."""
        left = exchange.timeout
        deadline = time.monotonic() + left
        while exchange.waiting:
            hurried = exchange.fatal and exchange.tracebacks  # the others may be waiting for the one that failed
            ready = self._answers.wait(min(left, _GRACE) if hurried else left)
            for rank in ready:
                self._take_answer(rank)
            left = deadline - time.monotonic()
            if not ready and hurried:
                break
            if not ready and left <= 0:
                raise self.fail(self._late(exchange))
        error = self._raised(exchange) if exchange.tracebacks else None
        if error is not None and exchange.fatal:
            raise self.fail(error)
        self._open.pop(exchange.sequence, None)
        if error is not None:
            raise error

    def _take_answer(self, rank: int) -> None:
        try:
            answer = self._processes.channels[rank].receive_response()
        except ChannelClosed:
            self._lost(rank)
        exchange = self._open.get(answer.sequence)
        if exchange is None:
            return
        exchange.waiting.discard(rank)
        if answer.nanoseconds > exchange.nanoseconds:
            exchange.nanoseconds = answer.nanoseconds
        if not answer.ok:
            exchange.tracebacks[rank] = answer.text

    def _lost(self, rank: int) -> NoReturn:
        """Handle a rank that has closed its channel: wait for its exit status, then end all ranks and raise."""
        if self._closing:
            raise ModelClosedError("the model was closed during the call")
        self._processes.ended.wait(END_SECONDS)  # the watching thread reports the first end, which ends the others
        raise self.fail(RankDiedError(f"rank {rank} of {self.degree} closed its channel and did not end", rank))

    def _raised(self, exchange: Exchange) -> RankFailedError:
        """Return the error of the lowest rank that raised, with its traceback."""
        rank, text = min(exchange.tracebacks.items())
        last = text.strip().splitlines()[-1] if text.strip() else "no message"
        what = f"rank {rank} of {self.degree} raised during {exchange.kind.words}: {last}"
        return RankFailedError(f"{what}\n--- traceback of rank {rank} ---\n{text}", rank, text)

    def _late(self, exchange: Exchange) -> RankTimeoutError:
        """Return the error of an exchange that was not answered in time. It blames the first rank that is stopped, else
        the one that has passed the fewest collectives: the others wait for it there."""
        processes, waiting = self._processes, sorted(exchange.waiting)
        states = {rank: processes.state(rank) for rank in waiting}
        collectives = {rank: processes.collectives(rank) for rank in waiting}
        rank = min(waiting, key=lambda rank: (states[rank] != "stopped", collectives[rank], rank))
        details = [
            f"rank {one} (pid {processes.pid(one)}) is {states[one]}"
            + (f", {collectives[one]} collectives passed" if collectives[one] else "")
            for one in waiting
        ]
        setting = "call_timeout" if exchange.kind in (Kind.STEP, Kind.ROUTE, Kind.RESET) else "start_timeout"
        text = (
            f"rank {rank} of {self.degree} did not finish its {exchange.kind.words} within {exchange.timeout:g} s "
            f"({'; '.join(details)}); all ranks have been ended: raise {setting} if the work is that long, or call "
            "restart()"
        )
        return RankTimeoutError(text + _last_output(rank, processes.output(rank)), rank)

    # --- ending ---

    def fail(self, error: NxdError) -> NxdError:
        """Record ``error`` unless there was an earlier failure, end every rank, and return the recorded error."""
        with self._mutex:
            if self.failure is None:
                self.failure = error
            failure = self.failure
        self._processes.kill()
        return failure

    def _on_exit(self, rank: int, how: str, output: str) -> None:
        if not self._closing and self.failure is None:
            self.fail(RankDiedError(f"rank {rank} of {self.degree} {how}{_last_output(rank, output)}", rank))

    def close(self) -> None:
        """End every rank. Idempotent; may be called from any thread, and at interpreter exit."""
        if os.getpid() != self._owner:
            return
        self._closing = True
        self._processes.kill()
        _live.discard(self)

    def health(self) -> list[RankHealth]:
        """Return the current health of every rank. Reads shared counters; disturbs nothing and takes no lock."""
        ranks = []
        for rank in range(self.degree):
            process = 0 if self._processes.together else rank
            begun, finished, clock, took = self.arena.progress(process) if self.arena is not None else (0, 0, 0, 0)
            state = self._processes.state(process)
            age = (time.monotonic_ns() - clock) / 1e9 if clock else None
            ranks.append(
                RankHealth(
                    rank=rank,
                    pid=self._processes.pid(process),
                    alive=state != "ended",
                    state=state,
                    steps=finished,
                    collectives=self._processes.collectives(rank),
                    busy_seconds=age if age is not None and begun > finished else 0.0,
                    last_step_age=age,
                    seconds=took / 1e9,
                )
            )
        return ranks


def _last_output(rank: int, output: str) -> str:
    return f"\n--- last output of rank {rank} ---\n{output}" if output else ""


@atexit.register
def _close_all() -> None:
    for supervisor in list(_live):
        supervisor.close()
