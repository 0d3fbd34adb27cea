"""A traced model in this process, without HTTP: prompts in, texts or vectors out.

from nxd_server import LLM, SamplingParams

with LLM("artifact") as llm:
    for output in llm.generate(["The raise statement", "A for loop"], SamplingParams(max_tokens=64)):
        print(output.prompt, output.outputs[0].text)
"""

from __future__ import annotations

import math
import os
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from nxd_infer.errors import ModelConfigError
from nxd_infer.hugging_face.tokenizer import TOKENIZER
from nxd_infer.runtime.model import parallel_model_load
from nxd_server.engine.admission import WholeRequest
from nxd_server.engine.draft_model import check_tokenizers
from nxd_server.engine.generation_engine import Engine
from nxd_server.engine.oneshot_engine import OneShotEngine
from nxd_server.engine.request import (
    ErrorEvent,
    Event,
    FinishEvent,
    FinishReason,
    PromptEvent,
    Ticket,
    TokenEvent,
    Usage,
    max_new_tokens,
)
from nxd_server.engine.sampling_params import SamplingParams
from nxd_server.engine.text_encoder import Encoded, TextEncoder, likeliest, probabilities
from nxd_server.errors import GenerateOnlyError, RequestError
from nxd_server.text.chat_template import AT_THE_END, ChatTemplate
from nxd_server.text.tokenizer import Tokenizer
from nxd_server.text.tokenizer_files import TextFiles

if TYPE_CHECKING:
    from nxd_server.text.tokenizer_files import Source

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's ``{"prompt": text}`` and ``{"prompt_token_ids": ids}``."""
Message = Mapping[str, Any]
Prompts = Prompt | Sequence[Prompt]
UNLIMITED = 1 << 60


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probabilities at one position of a completion, under the raw model distribution."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most likely tokens, best first, as many as ``logprobs`` requested."""


@dataclass
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Every generated token, including a stop token at the end."""
    logprobs: list[TokenLogprob] | None = None
    """One entry per token, if ``logprobs`` was requested."""
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    """The stop string or stop token that ended the completion."""


@dataclass
class RequestOutput:
    """A prompt and its ``n`` completions."""

    prompt: str | None
    """The prompt's text; None if token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: Usage
    """Number of tokens of the prompt, and of all completions together."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One entry per token of the prompt, None for the first, if ``prompt_logprobs`` was requested."""


@dataclass(frozen=True)
class ClassificationOutput:
    """A classifier's result for one text."""

    label: str
    """The most likely label; its index as text if the model names no labels."""
    logits: list[float]
    probabilities: list[float]
    """One per label. With a softmax they add up to 1; with a sigmoid each label is independent of the others. Empty
    for a model without probabilities, such as a regression model: its logits are its scores."""


class LLM:
    """An artifact, ready to generate (task ``generate``), embed or classify.

    Args:
        artifact_dir: the directory that ``nxd-infer trace`` or ``parallel_model_save`` wrote, tokenizer files included.
        in_process: run degree 1 in this process (default: at degree 1, yes).
        call_timeout, threads_per_rank, expect_digest, allow_kernel: as in ``parallel_model_load``.
        speculate: draft tokens per step, if the artifact was traced for as many; same results, often sooner.
        draft: the directory of a smaller model's artifact, or an EAGLE head's, which makes the draft tokens.
        generation_defaults: without explicit parameters, sample as the model's ``generation_config.json`` says.
        on_progress: called with (done, total, bucket) while graphs run for the first time.
        engine_options: further arguments of Engine or OneShotEngine, such as ``prefill_ratio``.

    Raises the errors of ``load_artifact``, and ModelConfigError if files that the task needs are missing. Safe to
    use from several threads; ``close()`` or the ``with`` block ends the ranks.
    """

    def __init__(
        self,
        artifact_dir: str | os.PathLike[str],
        *,
        in_process: bool | None = None,
        call_timeout: float | None = None,
        threads_per_rank: int | None = None,
        expect_digest: str | None = None,
        allow_kernel: bool = True,
        speculate: int = 0,
        draft: str | os.PathLike[str] | None = None,
        generation_defaults: bool = True,
        on_progress: Callable[[int, int, str], None] | None = None,
        **engine_options: Any,
    ):
        options: dict[str, Any] = {"call_timeout": call_timeout, "in_process": in_process, "allow_kernel": allow_kernel}
        options |= {"threads_per_rank": threads_per_rank}
        self.model = parallel_model_load(artifact_dir, expect_digest=expect_digest, **options)
        self.engine: Engine | OneShotEngine | None = None
        self._draft = None if draft is None else parallel_model_load(draft, **options)
        try:
            self.metadata: dict[str, Any] = self.model.manifest.metadata
            self.task = str(self.metadata.get("task") or "")
            self.sampling_defaults: dict[str, Any] = {}
            """Arguments of ``SamplingParams`` if a call gives no parameters."""
            if generation_defaults:
                self.sampling_defaults |= self.metadata.get("sampling_defaults") or {}
            self.tokenizer = _tokenizer(self.model.artifact)
            self.chat_template = ChatTemplate.from_dir(self.model.artifact)
            self.encoder: TextEncoder | None = None
            engine_options = {"restart_limit": 0, "idle_probe": None} | engine_options
            if self.task == "generate":
                # The caller waits for complete answers, so prefill as fast as possible, even if it delays decoding.
                engine_options = {"stall_ratio": math.inf} | engine_options
                engine_options |= {"speculate": speculate, "draft": self._draft}
                self.engine = Engine(self.model, self.tokenizer, **engine_options)
                if self._draft is not None:
                    check_tokenizers(self.model.artifact, self._draft.artifact)
                    self._draft.start()
            elif speculate or draft is not None:
                raise GenerateOnlyError("speculate" if speculate else "draft", self.task)
            else:
                self.engine = OneShotEngine(self.model, **engine_options)
                if self.task in ("embed", "classify") and self.tokenizer is not None:
                    self.encoder = TextEncoder(self.engine, self.tokenizer)
            self.model.start()
            self.engine.start(on_progress=on_progress)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the engine and the ranks; calls that are still running fail. Idempotent."""
        if self.engine is not None:
            self.engine.close()
        self.model.close()
        if self._draft is not None:
            self._draft.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def update_weights(self, weights: Any, *, tag: str | None = None, timeout: float = 60.0) -> int:
        """Use other weights for later calls: a training checkpoint, safetensors, tensors by name, or the model in
        training. Return the new version. Running calls finish on the old weights, within ``timeout`` seconds.

        Takes and raises the same as ``TensorParallelModel.update_weights``; also raises WeightsBusyError after
        ``timeout``, with the weights unchanged.
        """
        assert self.engine is not None
        return self.engine.update_weights(weights, tag=tag, timeout=timeout)

    # --- generation -----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        timeout: float | None = None,
        adapter: str | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; the results are in the order of the prompts.

        Args:
            prompts: a text, a list of token ids, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``, or a list of
                those.
            params: one for all prompts, or one per prompt; used as given. Default: ``SamplingParams`` of
                ``sampling_defaults``, with ``max_tokens`` limited to what fits.
            progress: show a progress bar on the terminal.
            timeout: seconds for the whole call.
            adapter: the name of a loaded adapter; None is the model itself.

        Raises RequestError before anything is generated, or the first failure of any prompt.
        """
        listed = [_plain(prompt) for prompt in _as_list(prompts)]
        encoded = [self._encode(prompt) for prompt in listed]
        texts = [prompt if isinstance(prompt, str) else None for prompt in listed]
        return self._answer(texts, encoded, params, progress, timeout, adapter)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
        timeout: float | None = None,
        adapter: str | None = None,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, using the model's chat template.

        ``template_variables``: ``tools`` and ``documents`` that the template shows, and variables of its own, such as
        ``enable_thinking``. Raises RequestError for one that the template does not read.
        """
        if self.chat_template is None:
            raise RequestError(
                "messages",
                "this artifact has no chat template: trace a model that has a chat_template.jinja, or use generate()",
            )
        for name, value in template_variables.items():
            given = value not in (None, [], {}) and name not in AT_THE_END
            if given and not self.chat_template.names(name):
                raise RequestError(name, "the model's chat template reads no such variable, and would ignore it")
        single = len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Sequence[Message]]", [messages] if single else messages)
        texts = [self.chat_template.render(conversation, **template_variables) for conversation in conversations]
        encoded = [self._require_tokenizer().encode(text, add_special_tokens=False) for text in texts]
        return self._answer(texts, encoded, params, progress, timeout, adapter)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        adapter: str | None = None,
    ) -> Iterator[PromptEvent | TokenEvent | FinishEvent]:
        """Complete one prompt and yield its events; leaving the loop cancels the rest. Raises the error if it fails."""
        tokens = self._encode(prompt)
        params = params or self._default(tokens)
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        ticket = self._engine().submit(tokens, params, events.put, timeout=timeout, adapter=adapter)
        try:
            open_choices = params.n
            while open_choices:
                event = events.get()
                if isinstance(event, ErrorEvent):
                    raise event.error
                open_choices -= isinstance(event, FinishEvent)
                yield event
        finally:
            ticket.cancel()

    def _answer(
        self,
        texts: Sequence[str | None],
        prompts: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
        timeout: float | None,
        adapter: str | None,
    ) -> list[RequestOutput]:
        engine = self._engine()
        many = params if isinstance(params, Sequence) else [params or self._default(ids) for ids in prompts]
        if len(many) != len(prompts):
            raise RequestError("params", f"{len(many)} sets of parameters were given for {len(prompts)} prompts")
        collectors = [_Collector(one) for one in many]
        tickets: list[Ticket] = []
        try:
            with WholeRequest() as whole:  # a weight swap waits until all prompts are answered
                for prompt, one, collector in zip(prompts, many, collectors, strict=True):
                    ticket = engine.submit(prompt, one, collector, timeout=timeout, adapter=adapter, whole=whole)
                    tickets.append(ticket)
            for number in _track(range(len(tickets)), "generating", progress):
                tickets[number].wait()
                if (error := collectors[number].error) is not None:
                    raise error
        finally:
            for ticket in tickets:  # after a failure or an interrupt; no effect on those that are done
                ticket.cancel()
        return [
            RequestOutput(
                text,
                prompt,
                collector.outputs,
                Usage(len(prompt), sum(len(output.token_ids) for output in collector.outputs), collector.cached_tokens),
                collector.prompt_logprobs(prompt),
            )
            for text, prompt, collector in zip(texts, prompts, collectors, strict=True)
        ]

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Load the LoRA adapter of a PEFT directory into a free slot, for ``generate(..., adapter=name)``.

        Needs an artifact that was traced with slots (``--lora-slots``). Raises RequestError if the adapter does not
        fit them, AdapterConflictError if the name is taken or no slot is free, and WeightsBusyError if the running step
        or another change of the weights takes longer than a minute.
        """
        self._engine().adapters.load(name, path)

    def remove_adapter(self, name: str) -> None:
        """Unload an adapter; its slot is free once the requests that use it have ended. Raises UnknownModelError."""
        self._engine().adapters.remove(name)

    def adapters(self) -> list[str]:
        """Return the names of the loaded adapters."""
        return [adapter.name for adapter in self._engine().adapters.listed()]

    def room(self, prompt: Prompt) -> int:
        """Return how many tokens fit after ``prompt``. Raises PromptTooLongError if the prompt itself does not fit."""
        return max_new_tokens(None, len(self._encode(prompt)), self._engine().max_len)

    def _default(self, tokens: Sequence[int]) -> SamplingParams:
        params = SamplingParams(**self.sampling_defaults)
        return params.replace(max_tokens=min(params.max_tokens or UNLIMITED, self.room(tokens)))

    def _encode(self, prompt: Prompt) -> list[int]:
        prompt = _plain(prompt)
        return self._require_tokenizer().encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _engine(self) -> Engine:
        if not isinstance(self.engine, Engine):
            raise ModelConfigError(f"the artifact's task is {self.task or 'unknown'!r}: it generates no text")
        return self.engine

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ModelConfigError(
                "the artifact has no tokenizer.json: give token ids instead of text, as llm.generate([[1, 2, 3]])"
            )
        return self.tokenizer

    # --- encoders -------------------------------------------------------------------------------------

    def embed(
        self,
        texts: str | Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        progress: bool = False,
    ) -> torch.Tensor:
        """Return one vector per text: float32 [texts, dimensions]. Needs task ``embed``.

        Args:
            prompt_name: the model's prompt to prepend to every text; None: its default, if it has one.
            truncate_prompt_tokens: truncate texts to this many tokens; -1: to the model's limit; None: never.
        """
        options = {"prompt_name": prompt_name, "truncate_prompt_tokens": truncate_prompt_tokens}
        results = self._encoded(self._encoder_for("embed"), texts, progress, **options)
        return torch.stack([result.values for result in results]) if results else torch.empty(0, 0)

    def classify(
        self,
        texts: str | Sequence[Prompt | tuple[str, str]],
        *,
        truncate_prompt_tokens: int | None = None,
        progress: bool = False,
    ) -> list[ClassificationOutput]:
        """Classify each text, or each pair of texts for a cross-encoder. Needs task ``classify``.

        ``truncate_prompt_tokens`` as for :meth:`embed`; in a pair the longer text is truncated first.
        """
        encoder = self._encoder_for("classify")
        results = self._encoded(encoder, texts, progress, truncate_prompt_tokens=truncate_prompt_tokens)
        outputs = []
        for result in results:
            probs = probabilities(result.values, encoder.scores)
            label = likeliest(result.values, encoder.labels)
            outputs.append(ClassificationOutput(label, result.values.tolist(), [] if probs is None else probs.tolist()))
        return outputs

    def _encoded(
        self, encoder: TextEncoder, texts: str | Sequence[Prompt | tuple[str, str]], progress: bool, **options: Any
    ) -> list[Encoded]:
        listed = [texts] if isinstance(texts, str) else list(texts)
        futures: list[Future[Encoded]] = []
        try:
            with WholeRequest() as whole:
                for i, text in enumerate(listed):
                    field = f"texts[{i}]"
                    tokens = encoder.tokens(_plain(text) if isinstance(text, Mapping) else text, field=field, **options)
                    futures.append(encoder.submit(tokens, field=field, whole=whole))
            return [future.result() for future in _track(futures, "encoding", progress)]
        finally:
            for future in futures:  # after a failure or an interrupt; no effect on those that are done
                future.cancel()

    def _encoder_for(self, task: str) -> TextEncoder:
        if self.task != task:
            raise ModelConfigError(f"the artifact's task is {self.task or 'unknown'!r}, not {task!r}")
        if self.encoder is None:
            self._require_tokenizer()
            raise ModelConfigError("the artifact has no encoder")
        return self.encoder


class _Collector:
    """Assembles a request's events into a completion."""

    def __init__(self, params: SamplingParams):
        self.error: Exception | None = None
        self._scores: list[tuple[float, tuple[tuple[int, float], ...]]] | None = None
        self.cached_tokens: int | None = None
        """Of the prompt, in the first choice that has ended."""
        self.outputs = [
            CompletionOutput(index, logprobs=None if params.logprobs is None else []) for index in range(params.n)
        ]

    def __call__(self, event: Event) -> None:
        output = self.outputs[event.index]
        if isinstance(event, PromptEvent):
            self._scores = event.scores
            return
        if isinstance(event, ErrorEvent):
            self.error = self.error or event.error
            return
        output.text += event.text
        if isinstance(event, FinishEvent):
            output.finish_reason, output.stop = event.reason, event.stop
            if self.cached_tokens is None:
                self.cached_tokens = event.usage.cached_tokens
            return
        output.token_ids.append(event.token)
        if output.logprobs is not None:
            output.logprobs.append(TokenLogprob(event.token, event.logprob, event.top))

    def prompt_logprobs(self, prompt: Sequence[int]) -> list[TokenLogprob | None] | None:
        if self._scores is None:
            return None
        return [None, *(TokenLogprob(token, *one) for token, one in zip(prompt[1:], self._scores, strict=True))]


def _plain(prompt: Prompt) -> str | Sequence[int]:
    """Return the text or the token ids of a prompt in any form."""
    if not isinstance(prompt, Mapping):
        return prompt
    given = [name for name, value in prompt.items() if value is not None]
    if given == ["prompt"] and isinstance(prompt["prompt"], str):
        return prompt["prompt"]
    if sorted(given) in (["prompt", "prompt_token_ids"], ["prompt_token_ids"]):  # the text of these ids, if any
        return list(prompt["prompt_token_ids"])
    raise RequestError("prompts", f"a prompt has the keys {given}; it must have prompt, a text, or prompt_token_ids")


def _as_list(prompts: Prompts) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if len(prompts) > 0 and all(isinstance(item, int) for item in prompts):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def _tokenizer(source: Source) -> Tokenizer | None:
    """Return the artifact's tokenizer, or None if it has none; a damaged one is an error."""
    return None if TextFiles(source).find(TOKENIZER) is None else Tokenizer.from_dir(source)


def _track(items: Sequence[Any], title: str, show: bool) -> Iterator[Any]:
    if not show:
        yield from items
        return
    from rich.progress import track

    yield from track(items, description=title, transient=True)
