"""Continuous batching in the engine's thread: requests become steps, and the outputs of steps become events."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping

from nxd_server.engine.adapter_slots import Adapters
from nxd_server.engine.core.model import Tensors
from nxd_server.engine.core.scheduler import Scheduler, Step
from nxd_server.engine.core.step_inputs import StepInputs
from nxd_server.engine.core.step_outputs import StepOutputs
from nxd_server.engine.engine_parts import EngineParts
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
from nxd_server.engine.generation_steps import GenerationSteps, steps_in_flight
from nxd_server.engine.inbox import Inbox
from nxd_server.engine.request import Choice
from nxd_server.engine.speculation import Speculation
from nxd_server.errors import DeadlineExceededError, GenerationError, RequestError, ranks_failed

log = logging.getLogger("nxd_server.engine")


class ContinuousBatcher:
    """The :class:`~nxd_server.engine.engine_thread.Batcher` of a decoder. Used only by the engine's thread."""

    def __init__(
        self,
        parts: EngineParts,
        inbox: Inbox,
        adapters: Adapters,
        scheduler: Scheduler[Choice],
        speculation: Speculation,
        inputs: Mapping[str, StepInputs],
        graph_names: list[str],
        eos_token_ids: tuple[int, ...],
    ):
        """``inputs``: the buffers of every graph; ``graph_names``: the graphs that may run; ``eos_token_ids``: the
        tokens that end an answer."""
        self.live_tokens = 0
        """Cache positions that hold tokens of running choices."""
        self._inbox = inbox
        self._queue, self._gate = parts.queue, parts.gate
        self._adapters = adapters
        self._scheduler = scheduler
        self._speculation = speculation
        self._steps = GenerationSteps(
            parts.steps, inputs, steps_in_flight(parts.model, speculation.active), self._fail_alone, self._refuse
        )
        self._graph_names = graph_names
        self._vocab_size = int(parts.model.manifest.metadata["vocab_size"])
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
        while not self._steps.full and (step := self._scheduler.next_step()) is not None:
            begun = self._steps.begin(self._speculation.put(step))
            if begun is not None:
                self._scheduler.begin(begun)
        if not self._steps:
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

    def _may_begin(self, choice: Choice) -> bool:
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

    def _finish_step(self) -> None:
        """Wait for the oldest step in flight and process its tokens."""
        finished = self._steps.finish()
        if finished is None:
            return
        step, gave, seconds = finished
        self._scheduler.complete(step, seconds)
        if self._speculation.active:
            rows = [self._speculation.settle(row, tokens) for row, tokens in zip(step.rows, gave.tokens, strict=False)]
            step = Step(step.kind, step.graph, tuple(rows))
        self._take_tokens(step, gave)
        self.live_tokens = self._scheduler.live_tokens

    def _take_tokens(self, step: Step[Choice], gave: StepOutputs) -> None:
        now = time.monotonic()
        for index, row in enumerate(step.rows):
            choice = row.sequence
            for place in range(row.length if step.kind == "decode" else 1):
                if not row.samples or choice.slot is None:
                    break
                token, logprob = gave.tokens[index][place], gave.logprob(index, place)
                if not 0 <= token < self._vocab_size or math.isnan(logprob):
                    found = f"token {token}, log-probability {logprob}"
                    self._fail(choice, GenerationError(f"the model gave no valid token ({found})"))
                    break
                if choice.first_token is None:
                    choice.first_token = now
                try:
                    top = gave.top(index, place, choice.params.logprobs) if choice.params.logprobs else ()
                    self._take_token(choice, token, logprob, top)
                except Exception as error:  # its text could not be decoded: fail only this request
                    self._fail_alone(choice, error)

    def _take_token(self, choice: Choice, token: int, logprob: float, top: tuple) -> None:
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

    def _finish(self, choice: Choice, reason: FinishReason, stop: str | int | None = None) -> None:
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

    def _fail(self, choice: Choice, error: Exception, outcome: str = "error") -> None:
        self._end(choice, outcome, lambda usage, times: ErrorEvent(choice.index, error, usage, times))

    def _fail_alone(self, choice: Choice, error: Exception) -> None:
        """Fail a choice for what concerns no other: its inputs could not be built, or its token not be handed over."""
        if isinstance(error, RequestError):
            self._fail(choice, error)
            return
        log.error("an answer cannot go on", exc_info=error)
        self._fail(choice, _failure(error))

    def _refuse(self, choice: Choice, error: Exception) -> None:
        self._scheduler.slots.forget()  # a choice that has ended may have been in the refused step
        self._fail(choice, _failure(error))

    def _end(self, choice: Choice, outcome: str, event: Callable[[Usage, Timings], Event]) -> None:
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

    def _send(self, choice: Choice, event: Event) -> None:
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
        while self._steps:
            self._finish_step()

    def prove(self) -> None:
        return  # what a step read was in the caches

    def warmed(self) -> None:
        self._scheduler.slots.forget()  # the ranks are new

    def graph_names(self) -> list[str]:
        return self._graph_names

    def padding_inputs(self, name: str) -> Tensors:
        inputs = self._steps.inputs[name]
        for index in range(inputs.batch):
            inputs.clear(index)
        return inputs.tensors


def _failure(error: Exception) -> GenerationError:
    failure = GenerationError(f"the step failed: {error}")
    failure.__cause__ = error
    return failure
