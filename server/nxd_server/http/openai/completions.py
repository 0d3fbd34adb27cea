"""``POST /v1/completions``."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request

from nxd_server.engine.request import FinishEvent, TokenEvent, max_new_tokens
from nxd_server.http.error_responses import bad_request, unsupported
from nxd_server.http.openai.generation import Choices, Generation, check_choices, respond, with_limit
from nxd_server.http.openai.logprobs import LegacyLogprobs
from nxd_server.http.openai.schemas import CompletionBody, token_lists
from nxd_server.http.openai.tools import requested_form
from nxd_server.http.request_context import (
    check_model,
    compiled_grammar,
    context_of,
    encode_prompts,
    require_task,
    unless_left,
)
from nxd_server.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


async def completions(request: Request, body: CompletionBody) -> Any:
    """Choices a completion request, at once or as a stream."""
    context = context_of(request)
    service, settings = context.service, context.settings
    adapter = check_model(service, body.model)
    require_task(service, "/v1/completions", "generate")
    body.check_stream_options()
    if body.best_of is not None and body.best_of != body.n:
        raise unsupported("best_of", f"only the value of `n` ({body.n}) is, got {body.best_of}")
    most = service.top_logprobs
    if body.logprobs is not None and not 0 <= body.logprobs <= most:
        raise bad_request(f"`logprobs` must be from 0 to {most}, got {body.logprobs}", param="logprobs")
    if body.echo and body.logprobs is not None:
        raise unsupported("echo", "together with `logprobs`: no log-probabilities of the prompt are computed")
    tokenizer = service.require_tokenizer()
    prompts = token_lists(body.prompt, "prompt")
    check_choices(len(prompts), body.n, settings.max_choices, service.room)
    defaults = service.sampling_defaults
    params = body.sampling(body.max_tokens, body.logprobs, defaults)  # a wrong value: before long prompts are tokenized
    if body.constrained:
        params = params.replace(structured_outputs=requested_form(body))
    grammar = await compiled_grammar(request, params)
    tokens = await unless_left(request, encode_prompts(context, prompts, "prompt", special=body.add_special_tokens))
    if body.max_tokens is None:
        rooms = [max_new_tokens(None, len(ids), service.max_len) for ids in tokens]
        each = [with_limit(params, min(room, DEFAULT_MAX_TOKENS)) for room in rooms]
    else:
        max_new_tokens(body.max_tokens, max(map(len, tokens)), service.max_len)  # checks that it fits all
        each = [params] * len(tokens)
    echoes = [""] * len(tokens)
    if body.echo:
        echoes = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in prompts]
    answer = _Completion(
        adapter or service.model_name, tokenizer, body, echoes, tokens, not service.metadata.get("encodes_prompts")
    )
    return await respond(request, body.stream, Generation(request, tokens, each, adapter, grammar), answer)


class _Completion(Choices):
    """The answer of ``/v1/completions``."""

    WHOLE = CHUNK = "text_completion"

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        body: CompletionBody,
        echoes: list[str],
        prompts: list[list[int]],
        continues: bool,
    ):
        """``continues``: answers are no new texts, but continue their prompts."""
        super().__init__("cmpl", model, body, [len(ids) for ids in prompts])
        self._echoes = echoes
        top = body.logprobs
        self._logprobs = [
            None if top is None else LegacyLogprobs(tokenizer, top, ids if continues else ())
            for ids in prompts
            for _ in range(body.n)
        ]

    def token(self, choice: int, event: TokenEvent) -> None:
        if (table := self._logprobs[choice]) is not None:
            table.add(event)

    def choice(self, choice: int, text: str, reason: str) -> dict[str, Any]:
        table = self._logprobs[choice]
        return {
            "text": self._echoes[choice // self._n] + text,
            "logprobs": table.take() if table else None,
            "finish_reason": reason,
        }

    def opening(self) -> bytes:
        return b"".join(
            self._text(place * self._n + index, echo)
            for place, echo in enumerate(self._echoes)
            for index in range(self._n)
            if echo
        )

    def event(self, choice: int, event: TokenEvent | FinishEvent) -> bytes:
        if isinstance(event, FinishEvent):
            return self._text(choice, event.text, None, event.reason)
        self.count(choice)
        table = self._logprobs[choice]
        if table is not None and not event.is_stop:
            table.add(event)
            return self._text(choice, event.text, table.take())
        return self._text(choice, event.text) if event.text else b""

    def _text(self, choice: int, text: str, logprobs: dict | None = None, reason: str | None = None) -> bytes:
        return self.chunk(choice, f'"text":{json.dumps(text)}', logprobs, reason)
