"""The engine of decoders. Requests are checked and queued here, and answered by the engine's thread
(:class:`ContinuousBatcher`)."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Tokens

from nxd_infer.errors import ModelConfigError
from nxd_server.engine.adapter_slots import Adapters
from nxd_server.engine.admission import WholeRequest, check_timeout
from nxd_server.engine.continuous_batcher import ContinuousBatcher, Inbox
from nxd_server.engine.engine_core import EngineCore
from nxd_server.engine.events import EngineStats, OnEvent
from nxd_server.engine.model import Model
from nxd_server.engine.request import (
    Sequence,
    Ticket,
    check_prompt,
    derive_seed,
    eos_token_ids,
    max_new_tokens,
)
from nxd_server.engine.sampling_params import Sampler, SamplingParams, sampler_of
from nxd_server.engine.scheduler import Scheduler
from nxd_server.engine.speculation import Speculation, split_graphs
from nxd_server.engine.step_costs import Graph, StepCosts
from nxd_server.engine.step_tensors import StepInputs, check_buckets, tokens_input
from nxd_server.errors import RequestError
from nxd_server.text.detokenize import Detokenizer, TextStream
from nxd_server.text.grammars import CompiledGrammar, Grammars
from nxd_server.text.structured_outputs import StructuredOutputs
from nxd_server.text.tokenizer import Tokenizer


class Engine(EngineCore):
    """Serve one decoder artifact (``metadata["task"] == "generate"``)."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None = None,
        *,
        max_queued_requests: int = 128,
        max_queued_tokens: int | None = None,
        prefill_ratio: float = 4.0,
        stall_ratio: float = 4.0,
        speculate: int = 0,
        prefix_caching: bool = True,
        restart_limit: int = 3,
        restart_window: float = 600.0,
        idle_probe: float | None = 5.0,
        on_state: Callable[[str], None] | None = None,
        costs: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """``model`` is a RankModel or a TensorParallelModel. Without a tokenizer, events carry no text and stop strings
        are rejected. ``prefill_ratio`` and ``stall_ratio`` are the scheduler's bounds on prefill; ``speculate``: most
        guesses per step; ``prefix_caching``: a prompt is not computed as far as a free slot holds it. ``costs``:
        seconds by graph, used instead of measurements so that every run chooses the same steps; ``clock`` times the
        requests' timeouts.

        Raises ModelConfigError if the artifact is not one for generation, or was not traced to verify guesses.
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
        self.tokenizer = tokenizer
        self.max_queued_tokens = max_queued_tokens
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
        graphs, verifying = split_graphs((Graph(name, *shape) for name, shape in shapes.items()), meta, speculate)
        step_costs = StepCosts([*graphs, *verifying], costs)
        super().__init__(
            model,
            step_costs,
            max_queued_requests=max_queued_requests,
            capacity=self.slots,
            restart_limit=restart_limit,
            restart_window=restart_window,
            idle_probe=idle_probe,
            on_state=on_state,
        )
        self._inbox = Inbox(self.lock, clock)
        self.batcher: ContinuousBatcher = ContinuousBatcher(
            self,
            self._inbox,
            self.adapters,
            Scheduler(
                graphs,
                self.slots,
                step_costs,
                prefill_ratio=prefill_ratio,
                stall_ratio=stall_ratio,
                mixes=bool(meta.get("rows_share_slots")),
                whole_prompts=self._encodes_prompts,
                groups=manifest.pp_degree,
                prefix_caching=prefix_caching,
            ),
            Speculation(verifying, speculate, step_costs),
            {bucket.name: StepInputs(bucket, self.slots, model.arrays) for bucket in manifest.buckets},
            [graph.name for graph in (*graphs, *verifying)],  # verifying graphs only if speculating
            self.eos_token_ids,
        )

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
    ) -> Ticket:
        """Queue a request; its events are sent from the engine's thread.

        Args:
            prompt_tokens: 1 to ``max_len`` token ids.
            params: ``n`` choices are ``n`` sequences with seeds derived from the request's.
            timeout: seconds until the request fails with DeadlineExceededError, including queueing.
            adapter: the name of a loaded adapter; None is the model itself.
            whole: the request that this is a part of; the same weights answer all its parts.
            grammar: what :meth:`grammar_of` returned for ``params``; else it is compiled here.

        Raises RequestError (PromptTooLongError and MaxTokensError if it does not fit into ``max_len``,
        UnknownModelError for the adapter), QueueFullError or EngineUnavailableError; then nothing is queued.
        """
        queue, inbox = self.queue, self._inbox
        try:
            prompt = check_prompt(prompt_tokens, self.vocab_size, self.max_len)
            new_tokens = max_new_tokens(params.max_tokens, len(prompt), self.max_len)
            samplers = self._checked_params(params)
            grammar = grammar or self.grammar_of(params)
            check_timeout(timeout)
        except RequestError:
            queue.rejected["invalid"] += 1
            raise
        ticket = Ticket(request_id or secrets.token_hex(8), on_event, timeout, inbox.cancel, whole)
        with self.lock:
            self.check_open()
            queue.check(params.n)
            self._check_tokens(len(prompt) * params.n)
            lora = self.adapters.take(adapter, params.n)
            before = () if self._encodes_prompts else prompt
            for index, sampler in enumerate(samplers):
                text = None
                if self.tokenizer is not None:
                    text = TextStream(Detokenizer(self.tokenizer, before), params.stop)
                sampler.values["adapter"] = 0 if lora is None else lora.slot
                choice = Sequence(
                    id=next(self._ids),
                    ticket=ticket,
                    index=index,
                    prompt=prompt,
                    params=params,
                    max_new_tokens=new_tokens,
                    sampler=sampler,
                    text=text,
                    guide=None if grammar is None else grammar.guide(),
                    adapter=lora,
                )
                ticket.choices.append(choice)
            ticket.open = params.n
            queue.taken(params.n)
            self.gate.take(ticket.whole, params.n)
            inbox.put(ticket)
        if whole is None:
            ticket.whole.close()
        return ticket

    def grammar_of(self, params: SamplingParams) -> CompiledGrammar | None:
        """Return the compiled grammar that ``params`` asks for, if any; takes up to seconds. Raises RequestError."""
        if params.structured_outputs is None:
            return None
        constraint = StructuredOutputs.of(params.structured_outputs)
        if self._grammars is None:
            raise RequestError(constraint.where, "needs a tokenizer, and this artifact has none")
        return self._grammars.compiled(constraint)

    def stats(self) -> EngineStats:
        stats = super().stats()
        stats.slots = self.slots
        stats.running = self.batcher.running
        stats.slots_free = self.slots - stats.running
        stats.waiting = max(0, stats.waiting - stats.running)
        stats.waiting_tokens = self._inbox.waiting_tokens
        self.batcher.add_to(stats)
        stats.kv_usage = self.batcher.live_tokens / (self.slots * self.max_len)
        return stats

    def _checked_params(self, params: SamplingParams) -> list[Sampler]:
        if params.stop and self.tokenizer is None:
            raise RequestError("stop", "stop strings need a tokenizer, and this artifact has none; use stop_token_ids")
        if params.logprobs is not None and params.logprobs > self.max_logprobs:
            raise RequestError("logprobs", f"at most {self.max_logprobs} are available, got {params.logprobs}")
        limit = self.queue.capacity + self.queue.max_queued_requests
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
        limit, waiting = self.max_queued_tokens, self._inbox.waiting_tokens
        if limit is None or waiting == 0 or waiting + tokens <= limit:
            return
        raise self.queue.full(
            f"{waiting} prompt tokens are waiting and at most {limit} may; try again later", len(self._inbox.arrivals)
        )
