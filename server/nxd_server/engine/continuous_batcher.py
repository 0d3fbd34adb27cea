"""Continuous batching in the engine's thread: requests become steps, and the outputs of steps become events.

Two steps are in flight: the running one and, if the next one's tokens may be unknown, the next one too. With a pipeline
one per stage, of other choices each, and one that waits. The outputs of a step are processed while the next one runs,
so that ranks never wait for that. A choice that ends is then still in the next step, whose output for it is ignored;
with a pipeline it is in none.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from nxd_server.engine.adapter_slots import Adapters
from nxd_server.engine.engine_core import EngineCore
from nxd_server.engine.events import (
    EngineStats,
    ErrorEvent,
    Event,
    FinishEvent,
    FinishReason,
    Timings,
    TokenEvent,
    Usage,
)
from nxd_server.engine.model import Model, Tensors
from nxd_server.engine.request import Sequence, Ticket
from nxd_server.engine.scheduler import UNKNOWN, Row, Scheduler, Step
from nxd_server.engine.speculation import Speculation
from nxd_server.engine.step_runner import FATAL
from nxd_server.engine.step_tensors import StepInputs, StepOutputs, tokens_input
from nxd_server.errors import DeadlineExceededError, GenerationError, RequestError, ranks_failed

log = logging.getLogger("nxd_server.engine")


class ContinuousBatcher:
    """The :class:`~nxd_server.engine.engine_core.Batcher` of a decoder. Used only by the engine's thread."""

    def __init__(
        self,
        core: EngineCore,
        inbox: Inbox,
        adapters: Adapters,
        scheduler: Scheduler,
        speculation: Speculation,
        inputs: Mapping[str, StepInputs],
        graph_names: list[str],
        eos_token_ids: tuple[int, ...],
    ):
        """``inputs``: the buffers of every graph; ``graph_names``: the graphs that may run; ``eos_token_ids``: the
        tokens that end an answer."""
        self.live_tokens = 0
        """Cache positions that hold tokens of running choices."""
        self.depth = steps_in_flight(core.model, speculation.active)
        """Most steps in flight."""
        self._inbox = inbox
        self._queue, self._gate, self._steps = core.queue, core.gate, core.steps
        self._adapters = adapters
        self._scheduler = scheduler
        self._speculation = speculation
        self._inputs = inputs
        self._graph_names = graph_names
        self._vocab_size = int(core.model.manifest.metadata["vocab_size"])
        self._eos_token_ids = eos_token_ids
        self._prompt_tokens = self._reused_tokens = self._generated_tokens = 0

    # --- any thread -------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Number of choices that hold a slot."""
        return self._scheduler.running

    def add_to(self, stats: EngineStats) -> None:
        """Add the batcher's counters to ``stats``."""
        stats.prompt_tokens, stats.reused_tokens = self._prompt_tokens, self._reused_tokens
        stats.generated_tokens = self._generated_tokens
        stats.draft_tokens, stats.accepted_tokens = self._speculation.drafted, self._speculation.accepted

    # --- steps ------------------------------------------------------------------------------------------

    def has_news(self) -> bool:
        return self._inbox.has_news

    def wait_seconds(self) -> float:
        return self._inbox.wait_seconds()

    def work(self) -> bool:
        self._take_news()
        if self._scheduler.waiting:
            self._admit()
        while len(self._steps.in_flight) < self.depth and (step := self._scheduler.next_step()) is not None:
            self._begin_step(self._speculation.put(step))
        if not self._steps.in_flight:
            return False
        self._finish_step()
        return True

    def _admit(self) -> None:
        now = time.monotonic()
        for choice in self._scheduler.admit(self._may_begin):
            self._gate.begin(choice.ticket.whole)
            choice.admitted = now
            self._inbox.not_waiting(choice)
            self._prompt_tokens += len(choice.prompt)
            self._reused_tokens += choice.reused

    def _may_begin(self, choice: Sequence) -> bool:
        choice.cache_key = (self._gate.version, choice.adapter, choice.params.cache_salt)
        return self._gate.may_begin(choice.ticket.whole)

    def _take_news(self) -> None:
        if not self._inbox.due:
            return
        arrivals, cancels, late = self._inbox.take()
        for choice in arrivals:
            self._scheduler.add(choice)
        for ticket in cancels:
            for choice in ticket.choices:
                if not choice.ended:
                    self._finish(choice, "cancelled")
        for ticket in late:
            for choice in ticket.choices:
                if not choice.ended:
                    error = DeadlineExceededError(
                        f"the request was not finished within its {ticket.timeout:.3g} s "
                        f"({len(choice.output)} tokens were generated)"
                    )
                    self._fail(choice, error, "deadline")

    def _begin_step(self, step: Step) -> None:
        """Give ``step`` to the ranks, without the rows whose inputs cannot be written."""
        inputs = self._inputs[step.graph.name]
        rows: list[Row] = []
        for row in step.rows:
            try:
                inputs.put(len(rows), row)
            except Exception as error:  # one request's values must not stop the others' step
                self._fail_alone(row.sequence, error)
                continue
            rows.append(row)
        for index in range(len(rows), inputs.batch):
            inputs.clear(index)
        if not rows:
            return
        if len(rows) < len(step.rows):
            step = Step(step.kind, step.graph, tuple(rows))
        try:
            self._steps.begin(step.graph.name, inputs.tensors, step)
        except FATAL:
            raise
        except Exception as error:
            self._refuse_all(step, error)
        else:
            self._scheduler.begin(step)

    def _finish_step(self) -> None:
        """Wait for the oldest step in flight and process its tokens."""
        step: Step = self._steps.in_flight[0].work
        useful = sum(row.length for row in step.rows if not row.sequence.ended)
        try:
            outputs = self._steps.finish(useful, step.graph.batch * step.graph.length - useful)
        except FATAL:
            raise
        except Exception as error:
            self._refuse_all(step, error)
            return
        result = StepOutputs(outputs, step.graph.batch)
        if self._speculation.active:
            settled = zip(step.rows, result.tokens, strict=False)
            rows = [self._speculation.settle(row, tokens) for row, tokens in settled]
            step = Step(step.kind, step.graph, tuple(rows))
        self._take_tokens(step, result)
        self.live_tokens = self._scheduler.live_tokens

    def _take_tokens(self, step: Step, result: StepOutputs) -> None:
        now = time.monotonic()
        for index, row in enumerate(step.rows):
            choice = row.sequence
            for place in range(row.length if step.kind == "decode" else 1):
                if not row.samples or choice.slot is None:
                    break
                token, logprob = result.tokens[index][place], result.logprob(index, place)
                if not 0 <= token < self._vocab_size or math.isnan(logprob):
                    values = f"token {token}, log-probability {logprob}"
                    self._fail(choice, GenerationError(f"the model gave no valid token ({values})"))
                    break
                if choice.first_token is None:
                    choice.first_token = now
                try:
                    top = result.top(index, place, choice.params.logprobs) if choice.params.logprobs else ()
                    self._take_token(choice, token, logprob, top)
                except Exception as error:  # its text could not be decoded: fail only this request
                    self._fail_alone(choice, error)

    def _take_token(self, choice: Sequence, token: int, logprob: float, top: tuple) -> None:
        params, guide = choice.params, choice.guide
        choice.output.append(token)
        self._generated_tokens += 1
        may_stop = len(choice.output) > params.min_tokens
        named, ends = token in params.stop_token_ids, token in self._eos_token_ids
        if (may_stop and (named or (ends and not params.ignore_eos))) or (ends and guide is not None):
            self._send(choice, TokenEvent(choice.index, token, "", logprob, top, is_stop=True))
            self._finish(choice, "stop", stop=token if named else None)
            return
        if guide is not None:
            guide.take(token)
        may_stop = len(choice.output) >= params.min_tokens
        text = choice.text.push(token, may_stop=may_stop) if choice.text is not None else ""
        self._send(choice, TokenEvent(choice.index, token, text, logprob, top))
        if choice.text is not None and choice.text.matched is not None:
            self._finish(choice, "stop", stop=choice.text.matched)
        elif guide is not None and guide.complete:
            self._finish(choice, "stop")
        elif len(choice.output) >= choice.max_new_tokens:
            self._finish(choice, "length")

    # --- endings -------------------------------------------------------------------------------------------

    def _finish(self, choice: Sequence, reason: FinishReason, stop: str | int | None = None) -> None:
        tail = ""
        if choice.text is not None and not choice.ended and not isinstance(stop, str):
            try:
                tail = choice.text.flush()
            except Exception as error:  # its text could not be decoded: fail only this request
                self._refuse(choice, error)
                return
            if reason == "length" and choice.text.matched is not None:
                reason, stop = "stop", choice.text.matched
        self._end(choice, reason, lambda usage, times: FinishEvent(choice.index, reason, usage, times, tail, stop))

    def _fail(self, choice: Sequence, error: Exception, outcome: str = "error") -> None:
        self._end(choice, outcome, lambda usage, times: ErrorEvent(choice.index, error, usage, times))

    def _fail_alone(self, choice: Sequence, error: Exception) -> None:
        """Fail a choice for what concerns no other: its inputs could not be built, or its token not be handed over."""
        if isinstance(error, RequestError):
            self._fail(choice, error)
            return
        log.error("an answer cannot go on", exc_info=error)
        self._fail(choice, _failure(error))

    def _refuse_all(self, step: Step, error: Exception) -> None:
        """Fail these rows because the graph rejected them; the ranks and the other requests continue."""
        log.error("a step of %s failed", step.graph.name, exc_info=error)
        for row in step.rows:
            self._refuse(row.sequence, error)

    def _refuse(self, choice: Sequence, error: Exception) -> None:
        self._scheduler.slots.forget()  # a choice that has ended may have been in the refused step
        self._fail(choice, _failure(error))

    def _end(self, choice: Sequence, outcome: str, event: Callable[[Usage, Timings], Event]) -> None:
        """Free the slot, count, and only then notify the caller: a caller that sees the end sees the slot free."""
        if choice.ended:
            return
        choice.ended = True
        if choice.admitted is None:
            self._inbox.not_waiting(choice)
        self._scheduler.remove(choice, keep=outcome != "error")
        self._adapters.give_back(choice.adapter)
        self.live_tokens = self._scheduler.live_tokens
        now = time.monotonic()
        ticket = choice.ticket
        times = Timings(ticket.arrived, choice.admitted, choice.first_token, now)
        self._queue.ended(outcome, now - ticket.arrived)
        self._send(choice, event(Usage(len(choice.prompt), len(choice.output), choice.reused), times))
        ticket.close_one()
        self._gate.end(ticket.whole)
        self._queue.reported()

    def _send(self, choice: Sequence, event: Event) -> None:
        try:
            choice.ticket.on_event(event)
        except Exception:
            log.exception("request %s: on_event raised; the request is cancelled", choice.ticket.request_id)
            if not choice.ended:
                self._inbox.cancel(choice.ticket)

    def fail_all(self, error: Exception) -> None:
        for choice in [*self._scheduler.sequences(), *self._inbox.empty()]:
            self._fail(choice, error)

    def ranks_lost(self, error: BaseException) -> None:
        self.fail_all(ranks_failed(error))

    # --- steps without a request ------------------------------------------------------------------

    def finish_steps(self) -> None:
        while self._steps.in_flight:
            self._finish_step()

    def prove(self) -> None:
        return  # what a step read was in the caches

    def warmed(self) -> None:
        self._scheduler.slots.forget()  # the ranks are new

    def graph_names(self) -> list[str]:
        return self._graph_names

    def padding_inputs(self, name: str) -> Tensors:
        inputs = self._inputs[name]
        for index in range(inputs.batch):
            inputs.clear(index)
        return inputs.tensors


def _failure(error: Exception) -> GenerationError:
    failure = GenerationError(f"the step failed: {error}")
    failure.__cause__ = error
    return failure


def steps_in_flight(model: Model, known: bool) -> int:
    """Return how many steps the ranks may have at once. ``known``: tokens must be known before they are fed."""
    stages = model.manifest.pp_degree
    if stages > 1:
        return stages + 1 if model.arrays else 1
    return 2 if not known and steps_may_follow(model) else 1


def steps_may_follow(model: Model) -> bool:
    """Whether a step may begin while the previous one runs.

    The model must take arrays and run in processes, and its graphs must accept an unknown token and decode one token
    per row. With several ranks a core must be free: if the engine took a core from a rank during a step, all ranks
    would wait (2 % slower at tp 2 on two cores); between two steps they wait anyway.
    """
    tokens = [tokens_input(bucket) for bucket in model.manifest.buckets]
    unknown = all(spec.minimum is not None and spec.minimum <= UNKNOWN for spec in tokens)
    single = min(spec.shape[1] for spec in tokens) == 1
    free = model.manifest.tp_degree == 1 or model.spare_cores > 0
    return model.arrays and unknown and single and free


class Inbox:
    """Filled by callers, emptied by the engine's thread; ``lock`` is the engine's."""

    def __init__(self, lock: threading.Condition, clock: Callable[[], float]):
        """``clock`` times the requests' timeouts."""
        self.arrivals: deque[Sequence] = deque()
        self.waiting_tokens = 0
        """Tokens of prompts that have no slot yet."""
        self._lock = lock
        self._clock = clock
        self._cancels: deque[Ticket] = deque()
        self._deadlines: list[tuple[float, int, Ticket]] = []
        """A heap; tickets that are done are dropped when they are met, and when most of it may be."""
        self._most_deadlines = 64
        self._numbers = itertools.count()

    def put(self, ticket: Ticket) -> None:
        """Add all choices of a request; call with the lock held."""
        self.waiting_tokens += sum(len(choice.prompt) for choice in ticket.choices)
        self.arrivals.extend(ticket.choices)
        if ticket.timeout is not None:
            if len(self._deadlines) > self._most_deadlines:
                self._deadlines = [entry for entry in self._deadlines if not entry[2].done]
                heapq.heapify(self._deadlines)
                self._most_deadlines = 2 * len(self._deadlines) + 64
            heapq.heappush(self._deadlines, (self._clock() + ticket.timeout, next(self._numbers), ticket))
        self._lock.notify_all()

    def cancel(self, ticket: Ticket) -> None:
        """Request the end of a ticket's unfinished choices. Thread-safe."""
        with self._lock:
            self._cancels.append(ticket)
            self._lock.notify_all()

    def not_waiting(self, choice: Sequence) -> None:
        """Record that a choice's prompt has a slot, or has ended without one."""
        with self._lock:
            self.waiting_tokens -= len(choice.prompt)

    @property
    def has_news(self) -> bool:
        """Whether callers have left anything."""
        return bool(self.arrivals or self._cancels)

    @property
    def due(self) -> bool:
        """Whether :meth:`take` may return something. Needs no lock, because it only reads."""
        return bool(self.arrivals or self._cancels or self._first_is_due())

    def wait_seconds(self) -> float:
        """Seconds until the next deadline."""
        return max(0.0, self._deadlines[0][0] - self._clock()) if self._deadlines else math.inf

    def _first_is_due(self) -> bool:
        heap = self._deadlines
        return bool(heap) and (heap[0][0] <= self._clock() or heap[0][2].done)

    def take(self) -> tuple[list[Sequence], list[Ticket], list[Ticket]]:
        """Return new choices, cancelled tickets, and late tickets, each once."""
        with self._lock:
            arrivals, cancels, late = list(self.arrivals), list(self._cancels), []
            self.arrivals.clear()
            self._cancels.clear()
            while self._first_is_due():
                late.append(heapq.heappop(self._deadlines)[2])
            return arrivals, cancels, late

    def empty(self) -> list[Sequence]:
        """Return new choices and drop cancellations and deadlines, because everything is ending."""
        with self._lock:
            arrivals = list(self.arrivals)
            self.arrivals.clear()
            self._cancels.clear()
            self._deadlines.clear()
        return arrivals
