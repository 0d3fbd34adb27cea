"""``POST /v1/completions``."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from nxd_server.engine.request import FinishEvent, PromptEvent, TokenEvent, max_new_tokens, truncation
from nxd_server.http.error_responses import unsupported, wrong
from nxd_server.http.openai.generation import Choices, Generation, Given, check_choices, respond, with_limit
from nxd_server.http.openai.logprobs import LegacyLogprobs
from nxd_server.http.openai.schemas import CompletionBody, token_lists
from nxd_server.http.openai.tools import requested_form
from nxd_server.http.request_context import (
    compiled_grammar,
    context_of,
    encode_prompts,
    require_task,
    unless_left,
)
from nxd_server.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
FILL_IN = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
"""The tokens of models that fill in: before a prefix, before a suffix, and before what comes between them."""


@dataclass(frozen=True)
class Completion:
    """A request, ready to run: ``n`` choices of each prompt, behind its echo. ``continues``: they are no new texts."""

    generation: Generation
    model: str
    tokenizer: Tokenizer
    prompts: list[list[int]]
    n: int
    echoes: list[str]
    continues: bool


async def completions(request: Request, body: CompletionBody) -> Any:
    """Answer a completion request, at once or as a stream."""
    one = await prepared(request, body, "/v1/completions", DEFAULT_MAX_TOKENS)
    return await respond(request, body.stream, one.generation, _Answer(one, body))


async def prepared(request: Request, body: CompletionBody, route: str, most_tokens: int) -> Completion:
    """Check a request of ``route`` and prepare its answer, of ``most_tokens`` if it does not say how many.

    Raises ApiError and RequestError.
    """
    context, service = context_of(request), require_task(request, route, "generate")
    adapter = service.adapter_named(body.model)
    body.check_stream_options()
    n = _generated(body)
    top = service.top_logprobs
    if body.logprobs is not None and not 0 <= body.logprobs <= top:
        raise wrong("logprobs", f"must be from 0 to {top}, got {body.logprobs}")
    continues = not service.metadata.get("encodes_prompts")
    scored = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        if not continues:
            raise unsupported("echo", "together with `logprobs`: this model reads a prompt as a whole")
        scored = max(body.logprobs, scored or 0)
    if body.max_tokens == 0 and not body.echo and scored is None:
        raise wrong("max_tokens", "must be at least 1; 0 with `echo` or `prompt_logprobs`")
    tokenizer = service.require_tokenizer()
    prompts = token_lists(body.prompt, "prompt")
    if body.suffix:
        prompts[:] = [_around(prompt, body, tokenizer) for prompt in prompts]
    name = "n" if body.best_of is None else "best_of"
    check_choices(len(prompts), n, context.settings.max_choices, service.room, name)
    defaults = service.sampling_defaults
    params = body.sampling(body.max_tokens, body.logprobs, defaults)  # a wrong value: before long prompts are tokenized
    params = params.replace(n=n, prompt_logprobs=scored)
    if body.constrained:
        params = params.replace(structured_outputs=requested_form(body))
    grammar = await compiled_grammar(request, params)
    last = truncation(body.truncate_prompt_tokens, service.max_len, body.max_tokens)
    tokens = await unless_left(
        request, encode_prompts(context, prompts, "prompt", special=body.add_special_tokens, last=last)
    )
    if body.max_tokens is None:
        limit = functools.cache(functools.partial(with_limit, params))
        each = [limit(min(most_tokens, max_new_tokens(None, len(ids), service.max_len))) for ids in tokens]
    else:
        max_new_tokens(body.max_tokens, max(map(len, tokens)), service.max_len)  # checks that it fits all
        each = [params] * len(tokens)
    echoes = [""] * len(tokens)
    if body.echo:
        decode = functools.partial(tokenizer.decode, skip_special_tokens=body.skip_special_tokens)
        pairs = zip(prompts, tokens, strict=True)
        echoes = [one if isinstance(one, str) and last is None else decode(ids) for one, ids in pairs]
    generation = Generation(request, tokens, each, adapter, grammar, scored=body.n)
    return Completion(generation, adapter or service.model_name, tokenizer, tokens, n, echoes, continues)


def _generated(body: CompletionBody) -> int:
    """Return how many choices of a prompt are generated. Raises ApiError 400 for what a stream cannot have."""
    n = body.n if body.best_of is None else body.best_of
    if n < body.n:
        raise wrong("best_of", f"must be at least `n` ({body.n}), got {n}")
    for name, given in (("best_of", n > body.n), ("prompt_logprobs", body.prompt_logprobs is not None)):
        if body.stream and given:
            raise unsupported(name, "in a stream")
    return n


def _around(prompt: str | list[int], body: CompletionBody, tokenizer: Tokenizer) -> str:
    """Return the text after which a model writes what comes between ``prompt`` and the suffix."""
    found = next((tags for tags in FILL_IN if tokenizer.added.issuperset(tags)), None)
    if found is None:
        raise unsupported("suffix", "the model's tokenizer has no tokens for filling in the middle")
    if not isinstance(prompt, str) or body.echo:
        raise unsupported("suffix", "with `echo`" if body.echo else "with a prompt of token ids")
    before, behind, middle = found
    return f"{before}{prompt}{behind}{body.suffix}{middle}"


class _Answer(Choices):
    """The answer of ``/v1/completions``."""

    WHOLE = CHUNK = "text_completion"

    def __init__(self, one: Completion, body: CompletionBody):
        super().__init__("cmpl", one.model, body, one.prompts, one.n)
        self._tokenizer, self._echoes = one.tokenizer, one.echoes
        # With its end, as vLLM's: lm-eval takes all but the last of max_tokens=1 for those of the prompt.
        self._scored = self._shows_end = body.echo and body.logprobs is not None
        top, skip, continues = body.logprobs, body.skip_special_tokens, one.continues and not self._scored
        self._logprobs = [
            None if top is None else LegacyLogprobs(one.tokenizer, top, ids if continues else (), skip)
            for ids in one.prompts
            for _ in range(one.n)
        ]

    def prompt(self, choice: int, event: PromptEvent) -> None:
        super().prompt(choice, event)
        if self._scored and (table := self._logprobs[choice]) is not None:
            table.add_prompt(self.prompts[choice // self._n], event.scores)

    def token(self, choice: int, event: TokenEvent) -> None:
        if (table := self._logprobs[choice]) is not None:
            table.add(event)

    def choice(self, choice: int, text: str, reason: str) -> dict[str, Any]:
        table, prompt = self._logprobs[choice], self.prompts[choice // self._n]
        answer = {
            "text": self._echoes[choice // self._n] + text,
            "logprobs": table.take() if table else None,
            "finish_reason": reason,
        }
        if self._scores:
            answer["prompt_logprobs"] = self._scores[choice // self._n]
        return {**answer, "prompt_token_ids": prompt} if self.returns_ids else answer

    def opening(self) -> bytes:
        if self._scored:  # they come with the log-probabilities
            return b""
        shown = range(len(self._logprobs))
        return b"".join(self._begin(one) for one in shown if self.returns_ids or self._echoes[one // self._n])

    def _begin(self, choice: int, logprobs: dict | None = None) -> bytes:
        """Return the chunk with what a choice has before its first token."""
        place = choice // self._n
        content = f'"text":{json.dumps(self._echoes[place])}'
        if self.returns_ids:
            content += f',"prompt_token_ids":{json.dumps(self.prompts[place])}'
        return self.chunk(choice, content, logprobs=logprobs)

    def event(self, choice: int, event: Given) -> bytes:
        table = self._logprobs[choice]
        if isinstance(event, PromptEvent):
            self.prompt(choice, event)
            return self._begin(choice, table.take() if table else None)
        if isinstance(event, FinishEvent):
            return self._text(choice, event, reason=event.reason)
        self.count(choice)
        if table is not None and (self._shows_end or not event.is_stop):
            table.add(event)
            return self._text(choice, event, logprobs=table.take())
        return self._text(choice, event) if event.text or self.returns_ids else b""

    def _text(self, choice: int, event: TokenEvent | FinishEvent, **more: Any) -> bytes:
        return self.chunk(choice, f'"text":{json.dumps(event.text)}', event=event, **more)
