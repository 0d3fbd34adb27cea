"""Continuous batching for decoders: requests in, tokens out, one thread, step after step."""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Tokens
from typing import Any

from nxd_infer.errors import ModelConfigError
from nxd_server.engine.adapter_slots import Adapters
from nxd_server.engine.core.scheduler import Scheduler, Step
from nxd_server.engine.core.sequence import derive_seed
from nxd_server.engine.core.step_costs import Graph, StepCosts
from nxd_server.engine.core.step_inputs import Sampler, StepInputs, check_buckets, sampler_of, tokens_input
from nxd_server.engine.core.step_outputs import StepOutputs
from nxd_server.engine.core.steps_in_flight import Flights, steps_may_follow
from nxd_server.engine.deadlines import Deadlines
from nxd_server.engine.engine_thread import ModelWorker
from nxd_server.engine.events import EngineStats, ErrorEvent, Event, FinishEvent, OnEvent, Timings, TokenEvent, Usage
from nxd_server.engine.request import Choice, Ticket, check_prompt, max_new_tokens
from nxd_server.engine.sampling_params import SamplingParams
from nxd_server.engine.speculation import Speculation, split_graphs
from nxd_server.engine.weight_swap import WholeRequest
from nxd_server.errors import DeadlineExceededError, GenerationError, QueueFullError, RequestError
from nxd_server.text.tokenizer import Tokenizer

log = logging.getLogger("nxd_server.engine")


class Engine(ModelWorker):
    """Serve one decoder artifact (``metadata["task"] == "generate"``)."""

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer | None = None,
        *,
        max_queued_requests: int = 256,
        max_queued_tokens: int | None = None,
        prefill_ratio: float = 4.0,
        stall_ratio: float = 4.0,
        speculate: int = 0,
        restart_limit: int = 1,
        restart_window: float = 600.0,
        idle_probe: float | None = 5.0,
        on_state: Any = None,
        costs: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """``model`` is a TensorParallelModel or a RankModel (or anything with its ``run_bucket``, ``manifest``,
        ``restart`` and ``health``, and ``begin_bucket``, with ``checked=``, where its ``arrays`` is true). Without a
        tokenizer, events carry no text and stop strings are refused. ``prefill_ratio`` and ``stall_ratio`` are the
        scheduler's bounds on prefill; ``speculate``: tokens to guess ahead. ``costs``: seconds by graph in place of
        what is measured, so that the same steps are chosen in every run; ``clock``: of the requests' timeouts.

        Raises ModelConfigError when the artifact is not one for generation, or was not traced to verify guesses.
        """
        manifest = model.manifest
        meta = manifest.metadata
        if meta.get("task") != "generate":
            raise ModelConfigError(f"the artifact's task is {meta.get('task')!r}; this engine serves 'generate'")
        try:
            self.slots, self.max_len = int(meta["slots"]), int(meta["max_len"])
            self.vocab_size = int(meta["vocab_size"])
        except KeyError as error:
            raise ModelConfigError(f"the artifact's metadata lacks {error.args[0]!r}; trace the model again") from None
        check_buckets(manifest.buckets)
        super().__init__(
            model,
            max_queued_requests=max_queued_requests,
            capacity=self.slots,
            restart_limit=restart_limit,
            restart_window=restart_window,
            idle_probe=idle_probe,
            on_state=on_state,
        )
        self.tokenizer = tokenizer
        self.max_queued_tokens = max_queued_tokens
        self.adapters = Adapters(model, self._load_adapter)
        self.eos_token_ids = tuple(meta.get("eos_token_ids") or ())
        self.max_logprobs = int(meta.get("top_logprobs", 0))
        self._bias_slots = int(meta.get("bias_slots", 0))
        self._input_names = set.intersection(*({spec.name for spec in bucket.inputs} for bucket in manifest.buckets))
        arrays = getattr(model, "arrays", False)
        self._inputs = {bucket.name: StepInputs(bucket, self.slots, arrays) for bucket in manifest.buckets}
        shapes = {bucket.name: tokens_input(bucket).shape for bucket in manifest.buckets}
        graphs, verifying = split_graphs((Graph(name, *shape) for name, shape in shapes.items()), meta, speculate)
        self._graphs = [*graphs, *verifying]
        self.costs = StepCosts(self._graphs, costs)
        self._scheduler: Scheduler[Choice] = Scheduler(
            graphs,
            self.slots,
            self.costs,
            prefill_ratio=prefill_ratio,
            stall_ratio=stall_ratio,
            mixes=bool(meta.get("rows_share_slots")),
        )
        self._speculation = Speculation(verifying, speculate, self.costs)
        ahead = not self._speculation.active and steps_may_follow(model)
        self._flights = Flights(self.steps, self._inputs, 2 if ahead else 1, self._refuse)
        self._arrivals: deque[Choice] = deque()
        self._cancels: deque[Ticket] = deque()
        self._deadlines = Deadlines(clock)
        self._ids = itertools.count(1)
        self._waiting_tokens = self._prompt_tokens = self._generated_tokens = self._live_tokens = 0

    # --- callers' side ----------------------------------------------------------------------------------

    def submit(
        self,
        prompt_tokens: Tokens[int],
        params: SamplingParams,
        on_event: OnEvent,
        *,
        timeout: float | None = None,
        request_id: str | None = None,
        adapter: str | None = None,
        whole: WholeRequest | None = None,
    ) -> Ticket:
        """Queue a request; its events come from the engine's thread.

        Args:
            prompt_tokens: 1 to ``max_len`` token ids.
            params: ``n`` choices are ``n`` sequences with seeds derived from the request's.
            timeout: seconds until the request fails with DeadlineExceededError, queueing included.
            adapter: the name of a loaded adapter; None is the model itself.
            whole: the request that this is a part of, all of which the same weights answer.

        Raises RequestError (PromptTooLongError and MaxTokensError for what does not fit into ``max_len``,
        UnknownModelError for the adapter), QueueFullError or EngineUnavailableError; nothing is queued then.
        """
        try:
            prompt = check_prompt(prompt_tokens, self.vocab_size, self.max_len)
            new_tokens = max_new_tokens(params.max_tokens, len(prompt), self.max_len)
            samplers = self._checked_params(params)
            self._check_timeout(timeout)
        except RequestError:
            self._rejected["invalid"] += 1
            raise
        ticket = Ticket(request_id or secrets.token_hex(8), on_event, timeout, self._cancel, whole)
        with self._wake:
            self._check_open()
            self._check_queue(params.n)
            self._check_tokens(len(prompt) * params.n)
            lora = self.adapters.take(adapter, params.n)
            for index, sampler in enumerate(samplers):
                text = self.tokenizer.stream(params.stop, prompt) if self.tokenizer is not None else None
                identity = next(self._ids)
                choice = Choice(
                    identity, prompt, params, new_tokens, ticket=ticket, index=index, sampler=sampler, text=text
                )
                choice.adapter, sampler.values["adapter"] = lora, 0 if lora is None else lora.slot
                ticket.choices.append(choice)
            ticket.open = params.n
            self._book_taken(params.n)
            self._waiting_tokens += len(prompt) * params.n
            self._arrivals.extend(ticket.choices)
            self.gate.take(ticket.whole, params.n)
            self._deadlines.add(ticket)
            self._wake.notify_all()
        if whole is None:
            ticket.whole.close()
        return ticket

    def stats(self) -> EngineStats:
        stats = super().stats()
        stats.slots = self.slots
        stats.running = self._scheduler.running
        stats.slots_free = self.slots - stats.running
        stats.waiting = max(0, stats.waiting - stats.running)
        stats.waiting_tokens = self._waiting_tokens
        stats.prompt_tokens = self._prompt_tokens
        stats.generated_tokens = self._generated_tokens
        stats.draft_tokens, stats.accepted_tokens = self._speculation.drafted, self._speculation.accepted
        stats.kv_usage = self._live_tokens / (self.slots * self.max_len)
        return stats

    def _checked_params(self, params: SamplingParams) -> list[Sampler]:
        if params.stop and self.tokenizer is None:
            raise RequestError("stop", "stop strings need a tokenizer, and this artifact has none; use stop_token_ids")
        if params.logprobs is not None and params.logprobs > self.max_logprobs:
            raise RequestError("logprobs", f"at most {self.max_logprobs} are available, got {params.logprobs}")
        limit = self.capacity + self.max_queued_requests
        if params.n > limit:
            raise RequestError("n", f"at most {limit} choices fit this server's slots and queue, got {params.n}")
        seed = secrets.randbits(63) if params.seed is None else params.seed
        return [
            sampler_of(
                params,
                derive_seed(seed, index),
                self._input_names,
                self.vocab_size,
                self._bias_slots,
                self.eos_token_ids,
            )
            for index in range(params.n)
        ]

    def _check_tokens(self, tokens: int) -> None:
        limit = self.max_queued_tokens
        if limit is None or self._waiting_tokens == 0 or self._waiting_tokens + tokens <= limit:
            return
        self._rejected["queue_full"] += 1
        raise QueueFullError(
            f"{self._waiting_tokens} prompt tokens are waiting and at most {limit} may; try again later",
            self._retry_after(len(self._arrivals)),
        )

    def _cancel(self, ticket: Ticket) -> None:
        with self._wake:
            self._cancels.append(ticket)
            self._wake.notify_all()

    # --- the engine's thread ----------------------------------------------------------------------------

    def _has_news(self) -> bool:
        return bool(self._arrivals or self._cancels)

    def _wait_seconds(self) -> float:
        return self._deadlines.wait_seconds()

    def _work(self) -> bool:
        self._take_news()
        if self._scheduler.waiting:
            self._admit()
        while not self._flights.full and (step := self._scheduler.next_step()) is not None:
            launched = self._flights.launch(self._speculation.put(step))
            if launched is not None:
                self._scheduler.begin(launched)
        if not self._flights:
            return False
        self._land()
        return True

    def _admit(self) -> None:
        now = time.monotonic()
        for choice in self._scheduler.admit(lambda choice: self.gate.may_begin(choice.ticket.whole)):
            self.gate.begin(choice.ticket.whole)
            choice.admitted = now
            with self._wake:
                self._waiting_tokens -= len(choice.prompt)
            self._prompt_tokens += len(choice.prompt)

    def _take_news(self) -> None:
        if not (self._arrivals or self._cancels or self._deadlines.due):
            return
        with self._wake:
            arrivals, cancels = list(self._arrivals), list(self._cancels)
            self._arrivals.clear()
            self._cancels.clear()
            late = self._deadlines.take_late()
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

    def _land(self) -> None:
        """Wait for the step that was launched first, and take its tokens."""
        landed = self._flights.land()
        if landed is None:
            return
        step, gave, seconds = landed
        self._scheduler.complete(step, seconds)
        if self._speculation.active:
            rows = [self._speculation.settle(row, tokens) for row, tokens in zip(step.rows, gave.tokens, strict=False)]
            step = Step(step.kind, step.graph, tuple(rows))
        self._take_tokens(step, gave)
        self._live_tokens = self._scheduler.live_tokens

    def _take_tokens(self, step: Step[Choice], gave: StepOutputs) -> None:
        now = time.monotonic()
        for index, row in enumerate(step.rows):
            choice = row.sequence
            for place in range(row.length if step.kind == "decode" else 1):
                if not row.samples or choice.slot is None:
                    break
                token, logprob = gave.tokens[index][place], gave.logprob(index, place)
                if not 0 <= token < self.vocab_size or math.isnan(logprob):
                    found = f"token {token}, log-probability {logprob}"
                    self._fail(choice, GenerationError(f"the model gave no valid token ({found})"))
                    break
                if choice.first_token is None:
                    choice.first_token = now
                try:
                    top = gave.top(index, place, choice.params.logprobs) if choice.params.logprobs else ()
                    self._take_token(choice, token, logprob, top)
                except Exception as error:  # its text could not be decoded: again, this request alone
                    log.exception("a token could not be handed over")
                    self._fail(choice, _failure(error))

    def _take_token(self, choice: Choice, token: int, logprob: float, top: tuple) -> None:
        params = choice.params
        choice.output.append(token)
        self._generated_tokens += 1
        may_stop = len(choice.output) > params.min_tokens
        named = token in params.stop_token_ids
        if may_stop and (named or (token in self.eos_token_ids and not params.ignore_eos)):
            self._send(choice, TokenEvent(choice.index, token, "", logprob, top, is_stop=True))
            self._finish(choice, "stop", stop=token if named else None)
            return
        may_stop = len(choice.output) >= params.min_tokens
        text = choice.text.push(token, may_stop=may_stop) if choice.text is not None else ""
        self._send(choice, TokenEvent(choice.index, token, text, logprob, top))
        if choice.text is not None and choice.text.matched is not None:
            self._finish(choice, "stop", stop=choice.text.matched)
        elif len(choice.output) >= choice.max_new_tokens:
            self._finish(choice, "length")

    # --- ends -------------------------------------------------------------------------------------------

    def _finish(self, choice: Choice, reason: Any, stop: str | int | None = None) -> None:
        tail = ""
        if choice.text is not None and not choice.ended and not isinstance(stop, str):
            tail = choice.text.flush()
            if reason == "length" and choice.text.matched is not None:
                reason, stop = "stop", choice.text.matched
        self._end(choice, reason, lambda usage, times: FinishEvent(choice.index, reason, usage, times, tail, stop))

    def _fail(self, choice: Choice, error: Exception, outcome: str = "error") -> None:
        self._end(choice, outcome, lambda usage, times: ErrorEvent(choice.index, error, usage, times))

    def _refuse(self, choice: Choice, error: Exception) -> None:
        self._fail(choice, _failure(error))

    def _end(self, choice: Choice, outcome: str, event: Any) -> None:
        """Free the slot, count, and only then tell the caller: whoever sees the end sees the slot free."""
        if choice.ended:
            return
        choice.ended = True
        if choice.admitted is None:
            with self._wake:
                self._waiting_tokens -= len(choice.prompt)
        self._scheduler.remove(choice)
        self.adapters.give_back(choice.adapter)
        self._live_tokens = self._scheduler.live_tokens
        now = time.monotonic()
        ticket = choice.ticket
        times = Timings(ticket.arrived, choice.admitted, choice.first_token, now)
        self._book_end(outcome, now - ticket.arrived)
        self._send(choice, event(Usage(len(choice.prompt), len(choice.output)), times))
        ticket.close_one()
        self.gate.end(ticket.whole)
        self._book_told()

    def _send(self, choice: Choice, event: Event) -> None:
        try:
            choice.ticket.on_event(event)
        except Exception:
            log.exception("request %s: on_event raised; the request is cancelled", choice.ticket.request_id)
            if not choice.ended:
                self._cancel(choice.ticket)

    def _fail_all(self, error: Exception) -> None:
        with self._wake:
            choices = [*self._scheduler.sequences(), *self._arrivals]
            self._arrivals.clear()
            self._cancels.clear()
            self._deadlines.clear()
        for choice in choices:
            self._fail(choice, error)

    def _finish_steps(self) -> None:
        while self._flights:
            self._land()

    def _forget_steps(self) -> None:
        super()._forget_steps()
        self._flights.forget()

    def _bucket_names(self) -> list[str]:
        return [graph.name for graph in self._graphs]  # those that verify guesses only where there are any

    def _padding_inputs(self, bucket: str) -> Mapping[str, Any]:
        inputs = self._inputs[bucket]
        for index in range(inputs.batch):
            inputs.clear(index)
        return inputs.tensors


def _failure(error: Exception) -> GenerationError:
    failure = GenerationError(f"the step failed: {error}")
    failure.__cause__ = error
    return failure
