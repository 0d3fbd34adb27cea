"""The engine of decoders: continuous batching. Callers' threads check and queue requests; the engine's thread makes
steps of them, and events of the steps' outputs.

Two steps are in flight: the running one and, if the next one's tokens may be unknown, the next one too. With a pipeline
one per stage, of other choices each, and one that waits. The outputs of a step are processed while the next one runs,
so that ranks never wait for that. A choice that ends is then still in the next step, whose output for it is ignored;
with a pipeline it is in none.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import time
from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Tokens
from dataclasses import replace
from typing import Any

from nxd_infer.errors import ModelConfigError
from nxd_infer.runtime.rank_model import RankModel
from nxd_server.engine.adapter_slots import Adapters
from nxd_server.engine.admission import WholeRequest, check_timeout
from nxd_server.engine.draft_head import DraftHead
from nxd_server.engine.draft_model import DraftModel, DraftSpeculation
from nxd_server.engine.engine_core import EngineCore, EngineHealth, EngineStats
from nxd_server.engine.request import (
    ErrorEvent,
    Event,
    FinishEvent,
    FinishReason,
    Inbox,
    OnEvent,
    PromptEvent,
    Sequence,
    Ticket,
    Timings,
    TokenEvent,
    Usage,
    check_prompt,
    derive_seed,
    eos_token_ids,
    max_new_tokens,
)
from nxd_server.engine.sampling_params import Sampler, SamplingParams, sampler_of
from nxd_server.engine.scheduler import UNKNOWN, Row, Scheduler, Step
from nxd_server.engine.speculation import Speculation, check_speculate, split_graphs
from nxd_server.engine.step_runner import FATAL, Graph, StepCosts, Tensors
from nxd_server.engine.step_tensors import StepInputs, StepOutputs, check_buckets, tokens_input
from nxd_server.errors import DeadlineExceededError, GenerationError, RequestError
from nxd_server.text.detokenize import Detokenizer, TextStream
from nxd_server.text.grammars import CompiledGrammar, Grammars
from nxd_server.text.structured_outputs import StructuredOutputs
from nxd_server.text.token_rules import TokenRules
from nxd_server.text.tokenizer import Tokenizer

log = logging.getLogger("nxd_server.engine")


class Engine(EngineCore):
    """Serve one decoder artifact (``metadata["task"] == "generate"``)."""

    def __init__(
        self,
        model: RankModel,
        tokenizer: Tokenizer | None = None,
        *,
        prefill_ratio: float = 4.0,
        stall_ratio: float = 4.0,
        speculate: int = 0,
        draft: RankModel | None = None,
        prefix_caching: bool = True,
        slots: int | None = None,
        costs: Mapping[str, float] | None = None,
        draft_costs: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
        **core: Any,
    ):
        """``model`` is a RankModel or a TensorParallelModel. Without a tokenizer, events carry no text and stop strings
        are rejected. ``prefill_ratio`` and ``stall_ratio`` are the scheduler's bounds on prefill; ``speculate``: most
        guesses per step; ``draft``: the model that makes them, of which the caller owns the ranks, too (``speculate``
        is then by default what the artifact was traced for); ``prefix_caching``: a prompt is not computed as far as a
        free slot holds it; ``slots``: of the cache that are used, by default all that were traced. ``costs``,
        ``draft_costs``: seconds by graph, used instead of measurements so that every run chooses the same steps;
        ``clock`` times the requests' timeouts; ``core``: the options of :class:`EngineCore`.

        Raises ModelConfigError if the artifact is not one for generation, or was not traced to verify guesses, and for
        a draft that does not go with it.
        """
        manifest = model.manifest
        meta = manifest.metadata
        if meta.get("task") != "generate":
            raise ModelConfigError(f"the artifact's task is {meta.get('task')!r}; this engine serves 'generate'")
        try:
            traced, self.max_len = int(meta["slots"]), int(meta["max_len"])
            self.vocab_size = int(meta["vocab_size"])
        except KeyError as error:
            raise ModelConfigError(f"the artifact's metadata lacks {error.args[0]!r}; trace the model again") from None
        self.slots = traced if not slots else min(slots, traced)  # an unused slot takes no memory
        check_buckets(manifest.buckets)
        self.tokenizer = tokenizer
        self.adapters = Adapters(model, self.load_adapter)
        self.eos_token_ids = eos_token_ids(meta, tokenizer)
        self._grammars = None if tokenizer is None else Grammars(tokenizer, self.vocab_size, self.eos_token_ids)
        self.max_logprobs = int(meta.get("top_logprobs", 0))
        self._bias_slots = int(meta.get("bias_slots", 0))
        self._encodes_prompts = bool(meta.get("encodes_prompts"))
        """Whether an answer is a new text rather than its prompt's continuation."""
        self._input_names = set.intersection(*({spec.name for spec in bucket.inputs} for bucket in manifest.buckets))
        self._ids = itertools.count(1)
        shapes = {bucket.name: tokens_input(bucket).shape for bucket in manifest.buckets}
        single = min(shape[1] for shape in shapes.values()) == 1
        self._scores_prompts = single and "allowed" in self._input_names and not self._encodes_prompts
        if draft is not None:
            speculate = speculate or check_speculate(meta, 0, "draft: the model")
        graphs, verifying = split_graphs((Graph(name, *shape) for name, shape in shapes.items()), meta, speculate)
        step_costs = StepCosts([*graphs, *verifying], costs)  # verifying graphs only if speculating
        super().__init__(model, step_costs, self.slots, **core)
        self._inbox = Inbox(self.lock, clock)
        self._scheduler = Scheduler(
            graphs,
            self.slots,
            step_costs,
            prefill_ratio=prefill_ratio,
            stall_ratio=stall_ratio,
            mixes=bool(meta.get("rows_share_slots")),
            whole_prompts=self._encodes_prompts,
            groups=manifest.pp_degree,
            prefix_caching=prefix_caching,
        )
        self._draft = None
        self._speculation = Speculation(verifying, speculate, step_costs)
        if draft is not None:
            kind = DraftHead if draft.manifest.metadata.get("head") else DraftModel
            self._draft = kind(draft, manifest, self.restarts.another(), draft_costs)
            self._speculation = DraftSpeculation(self._draft, verifying, speculate, step_costs)
        self._inputs = {bucket.name: StepInputs(bucket, traced, model.arrays) for bucket in manifest.buckets}
        self._depths = {known: steps_in_flight(model, known) for known in (False, True)}
        self._prompt_tokens = self._reused_tokens = self._generated_tokens = 0
        self._live_tokens = 0
        """Cache positions that hold tokens of running choices, as far as the engine's thread has told."""

    # --- requests: any thread -----------------------------------------------------------------------------

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
        grammar: CompiledGrammar | None = None,
        rules: TokenRules | None = None,
    ) -> Ticket:
        """Queue a request; its events are sent from the engine's thread.

        Args:
            prompt_tokens: 1 to ``max_len`` token ids.
            params: ``n`` choices are ``n`` sequences with seeds derived from the request's.
            timeout: seconds until the request fails with DeadlineExceededError, including queueing.
            adapter: the name of a loaded adapter; None is the model itself.
            whole: the request that this is a part of; the same weights answer all its parts.
            grammar, rules: what :meth:`grammar_of` and :meth:`rules_of` returned for ``params``; else made here.

        Raises RequestError (PromptTooLongError and MaxTokensError if it does not fit into ``max_len``,
        UnknownModelError for the adapter), QueueFullError or EngineUnavailableError; then nothing is queued.
        """
        queue, inbox = self.queue, self._inbox
        try:
            prompt = check_prompt(prompt_tokens, self.vocab_size, self.max_len)
            new_tokens = max_new_tokens(params.max_tokens, len(prompt), self.max_len)
            samplers = self._checked_params(params)
            grammar = grammar or self.grammar_of(params)
            rules = rules or self.rules_of(params)
            check_timeout(timeout)
        except RequestError:
            queue.rejected["invalid"] += 1
            raise
        ticket = Ticket(request_id or secrets.token_hex(8), on_event, timeout, inbox.cancel, whole)
        with self.lock:
            self.check_room(params.n, len(prompt) * params.n, whole=ticket.whole, timeout=timeout)
            lora = None if adapter is None else self.adapters.take(adapter, params.n)
            before, work = () if self._encodes_prompts else prompt, queue.work(len(prompt), new_tokens)
            for index, sampler in enumerate(samplers):
                text = None
                if self.tokenizer is not None:
                    detokenizer = Detokenizer(self.tokenizer, before, params.skip_special_tokens)
                    text = TextStream(detokenizer, params.stop, params.include_stop_str_in_output)
                sampler.values["adapter"] = 0 if lora is None else lora.slot
                choice = Sequence(
                    id=next(self._ids),
                    ticket=ticket,
                    index=index,
                    prompt=prompt,
                    params=params,
                    max_new_tokens=new_tokens,
                    work=work,
                    sampler=sampler,
                    text=text,
                    guide=None if grammar is None else grammar.guide(),
                    rules=rules,
                    adapter=lora,
                    scores=None if params.prompt_logprobs is None or index > 0 else [],
                )
                ticket.choices.append(choice)
            ticket.open = params.n
            queue.taken(ticket.whole, params.n, len(prompt) * params.n, work * params.n)
            self.gate.take(ticket.whole, params.n)
            inbox.put(ticket)
        if whole is None:
            ticket.whole.close()
        return ticket

    def held(self, prompt: Tokens[int], adapter: str | None = None, salt: Hashable = None) -> int:
        """Return how many tokens at the start of ``prompt`` a free slot holds now, if they are worth to be sought."""
        lora = next((one for one in self.adapters.listed() if one.name == adapter), None)
        return self._scheduler.slots.held(prompt, (self.gate.version, lora, salt))

    def grammar_of(self, params: SamplingParams) -> CompiledGrammar | None:
        """Return the compiled grammar that ``params`` asks for, if any; takes up to seconds. Raises RequestError."""
        if params.structured_outputs is None:
            return None
        constraint = StructuredOutputs.of(params.structured_outputs)
        if self._grammars is None:
            raise RequestError(constraint.where, "needs a tokenizer, and this artifact has none")
        return self._grammars.compiled(constraint)

    def rules_of(self, params: SamplingParams) -> TokenRules | None:
        """Return the rules that ``params`` ask for, if any; takes up to a second. Raises RequestError."""
        given = params.allowed_token_ids, params.bad_words
        return TokenRules(*given, self.tokenizer, self.vocab_size) if any(given) else None

    def stats(self) -> EngineStats:
        running = self._scheduler.running
        stats = super().stats()
        stats.slots, stats.slots_free, stats.running = self.slots, self.slots - running, running
        stats.waiting = max(0, stats.waiting - running)
        stats.prompt_tokens, stats.reused_tokens = self._prompt_tokens, self._reused_tokens
        stats.generated_tokens = self._generated_tokens
        stats.draft_tokens, stats.accepted_tokens = self._speculation.drafted, self._speculation.accepted
        stats.kv_usage = self._live_tokens / (self.slots * self.max_len)
        return stats

    def health(self) -> EngineHealth:
        draft, found = self._draft, super().health()
        told = None if draft is None else {"ready": draft.ready, "restarts": draft.restarts.count}
        return replace(found, draft=told)

    def _checked_params(self, params: SamplingParams) -> list[Sampler]:
        if params.stop and self.tokenizer is None:
            raise RequestError("stop", "stop strings need a tokenizer, and this artifact has none; use stop_token_ids")
        for name in ("logprobs", "prompt_logprobs"):
            if (asked := getattr(params, name)) is not None and asked > self.max_logprobs:
                raise RequestError(name, f"at most {self.max_logprobs} are available, got {asked}")
        if params.prompt_logprobs is not None and not self._scores_prompts:
            what = "a decoder whose graphs take single tokens and have the input 'allowed', which this artifact is not"
            raise RequestError("prompt_logprobs", f"needs {what}")
        limit = self.queue.most
        if params.n > limit:
            raise RequestError("n", f"at most {limit} choices fit this server's slots and queue, got {params.n}")
        seed = secrets.randbits(63) if params.seed is None else params.seed
        graphs = self._input_names, self.vocab_size, self._bias_slots, self.eos_token_ids
        return [sampler_of(params, derive_seed(seed, index), *graphs) for index in range(params.n)]

    # --- steps: the engine's thread -----------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """Most steps in flight."""
        return self._depths[self._speculation.wants]

    def _has_news(self) -> bool:
        return self._inbox.has_news

    def _wait_seconds(self) -> float:
        return self._inbox.wait_seconds()

    def _work(self) -> bool:
        self._take_news()
        if self._scheduler.waiting:
            self._admit()
        while len(self.steps.in_flight) < self.depth and (step := self._scheduler.next_step()) is not None:
            self._begin_step(self._speculation.put(step) if self._speculation.active else step)
        if not self.steps.in_flight:
            return False
        self._finish_step()
        return True

    def _admit(self) -> None:
        now = time.monotonic()
        admitted = self._scheduler.admit(self._may_begin)
        self.queue.begun(admitted, full=not self._scheduler.slots.free and self._scheduler.waiting > 0)
        for choice in admitted:
            self.gate.begin(choice.ticket.whole)
            choice.admitted = now
            self._prompt_tokens += len(choice.prompt)
            self._reused_tokens += choice.reused

    def _may_begin(self, choice: Sequence) -> bool:
        choice.cache_key = (self.gate.version, choice.adapter, choice.params.cache_salt)
        first = choice.ticket.choices[0]  # it alone scores the prompt, and the others' scores come before their tokens
        ready = first is choice or first.scores is None or first.first_token is not None or first.ended
        return ready and self.gate.may_begin(choice.ticket.whole)

    def _take_news(self) -> None:
        if not self._inbox.due:
            return
        arrivals, cancels, late = self._inbox.take()
        for choice in arrivals:
            self._scheduler.add(choice)
        for ticket in cancels:
            for choice in ticket.choices:
                self._finish(choice, "cancelled")
        for ticket in late:
            for choice in ticket.choices:
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
            self.steps.begin(step.graph.name, inputs.tensors, step)
        except FATAL:
            raise
        except Exception as error:
            self._refuse_all(step, error)
        else:
            self._scheduler.begin(step)

    def _finish_step(self) -> None:
        """Wait for the oldest step in flight and process its tokens."""
        step: Step = self.steps.in_flight[0].work
        useful = sum(row.length for row in step.rows if not row.sequence.ended)
        try:
            outputs = self.steps.finish(useful, step.graph.batch * step.graph.length - useful)
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
            self._speculation.saw(step, outputs)
        self._take_tokens(step, result)
        self._live_tokens = self._scheduler.live_tokens

    def _take_tokens(self, step: Step, result: StepOutputs) -> None:
        now = time.monotonic()
        for index, row in enumerate(step.rows):
            choice = row.sequence
            for place in range(row.length if step.kind == "decode" else 1):
                if choice.slot is None or (not row.samples and choice.scores is None):
                    break
                token, logprob = result.tokens[index][place], result.logprob(index, place)
                if not 0 <= token < self.vocab_size or math.isnan(logprob):
                    values = f"token {token}, log-probability {logprob}"
                    self._fail(choice, GenerationError(f"the model gave no valid token ({values})"))
                    break
                if choice.scores is not None and not row.samples:
                    right = token == choice.prompt[row.start + 1]  # else that one cannot come at all
                    top = result.top(index, place, choice.params.prompt_logprobs or 0)
                    choice.scores.append((logprob if right else -math.inf, top))
                    break
                if choice.first_token is None:
                    choice.first_token = now
                    if choice.scores is not None:
                        for one in choice.ticket.choices:
                            self._send(one, PromptEvent(one.index, choice.scores))
                if choice.max_new_tokens == 0:
                    self._finish(choice, "length")
                    break
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
        named, ends = token in params.stop_token_ids, token in self.eos_token_ids
        if (may_stop and (named or (ends and not params.ignore_eos))) or (ends and guide is not None):
            text = ""
            if params.include_stop_str_in_output and choice.text is not None:
                text = choice.text.push(token, may_stop=False)
            self._send(choice, TokenEvent(choice.index, token, text, logprob, top, is_stop=True))
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
            self.queue.withdrawn(choice)
        self._speculation.ended(choice)
        self._scheduler.remove(choice, keep=outcome != "error")
        if choice.adapter is not None:
            self.adapters.give_back(choice.adapter)
        self._live_tokens = self._scheduler.live_tokens
        now = time.monotonic()
        ticket = choice.ticket
        times = Timings(ticket.arrived, choice.admitted, choice.first_token, now)
        self.queue.ended(outcome, ticket.whole, len(choice.output))
        self._send(choice, event(Usage(len(choice.prompt), len(choice.output), choice.reused), times))
        ticket.close_one()
        self.gate.end(ticket.whole)
        self.queue.reported()

    def _send(self, choice: Sequence, event: Event) -> None:
        try:
            choice.ticket.on_event(event)
        except Exception:
            log.exception("request %s: on_event raised; the request is cancelled", choice.ticket.request_id)
            if not choice.ended:
                self._inbox.cancel(choice.ticket)

    def _fail_all(self, error: Exception) -> None:
        for choice in [*self._scheduler.sequences(), *self._inbox.empty()]:
            self._fail(choice, error)

    # --- steps without a request ------------------------------------------------------------------

    def _finish_steps(self) -> None:
        while self.steps.in_flight:
            self._finish_step()

    def _warmed(self) -> None:
        self._scheduler.slots.forget()  # the ranks are new
        if self._draft is not None and self.state == "starting":
            self._draft.warm_up()

    def _idle(self, openings: int) -> None:
        super()._idle(openings)
        if self._draft is not None and not self._has_news():
            self._draft.when_idle(self._idle_probe)

    def close(self, timeout: float = 60.0) -> None:
        if self._draft is not None:
            self._draft.close()
        super().close(timeout)

    def _padding_inputs(self, name: str) -> Tensors:
        inputs = self._inputs[name]
        for index in range(inputs.batch):
            inputs.clear(index)
        return inputs.tensors


def _failure(error: Exception) -> GenerationError:
    failure = GenerationError(f"the step failed: {error}")
    failure.__cause__ = error
    return failure


def steps_in_flight(model: RankModel, known: bool) -> int:
    """Return how many steps the ranks may have at once. ``known``: tokens must be known before they are fed.

    For a step to begin while the previous one runs, the model must take arrays and run in processes, and without a
    pipeline its graphs must accept an unknown token and decode one token per row. With several ranks a core must be
    free: if the engine took a core from a rank during a step, all ranks would wait (2 % slower at tp 2 on two cores);
    between two steps they wait anyway.
    """
    stages = model.manifest.pp_degree
    if stages > 1:
        return stages + 1 if model.arrays else 1
    tokens = [tokens_input(bucket) for bucket in model.manifest.buckets]
    unknown = all(spec.minimum is not None and spec.minimum <= UNKNOWN for spec in tokens)
    single = min(spec.shape[1] for spec in tokens) == 1
    free = model.manifest.tp_degree == 1 or model.spare_cores > 0
    return 2 if model.arrays and not known and unknown and single and free else 1
