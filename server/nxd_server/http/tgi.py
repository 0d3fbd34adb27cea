"""Hugging Face's text-generation-inference: ``POST /``, ``/generate`` and ``/generate_stream``, and ``GET /info``."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from nxd_infer.util.version import VERSION
from nxd_server.engine.request import FinishEvent, PromptEvent, TokenEvent
from nxd_server.engine.sampling_params import MAX_STOP_STRINGS
from nxd_server.http.error_responses import ApiError, clip, encode, wrong
from nxd_server.http.openai.completions import Completion, prepared
from nxd_server.http.openai.generation import Answer, Generation, Given, respond
from nxd_server.http.openai.logprobs import finite
from nxd_server.http.openai.schemas import CompletionBody
from nxd_server.http.request_body import Body, Fields, Listed, Neutral, Whole, equals, is_one_of
from nxd_server.http.request_context import context_of
from nxd_server.http.scope_keys import FIELDS

DEFAULT_MAX_TOKENS = 100
SAME = ("best_of", "frequency_penalty", "repetition_penalty", "seed", "temperature", "top_k", "top_p", "stop")
OTHERS = {"max_tokens": "max_new_tokens", "truncate_prompt_tokens": "truncate", "model": "adapter_id"}
OTHERS |= {"logprobs": "top_n_tokens", "prompt_logprobs": "decoder_input_details", "structured_outputs": "grammar"}
"""What the fields of a completion are called here."""


class Parameters(Fields):
    """The object ``parameters``."""

    NEUTRAL: ClassVar[Neutral] = {"typical_p": equals(1), "watermark": is_one_of(False)}

    adapter_id: str | None = None
    best_of: Whole | None = Field(None, description="Sample this many answers, and return the likeliest.")
    decoder_input_details: bool = False
    details: bool = False
    do_sample: bool = False
    frequency_penalty: float | None = None
    grammar: dict[str, Any] | None = Field(None, description="Its type, json, regex or json_schema, and its value.")
    max_new_tokens: Whole | None = Field(None, description="Default: 100, or what fits.")
    repetition_penalty: float | None = None
    return_full_text: bool = False
    seed: Whole | None = None
    stop: Listed[str] | None = None
    temperature: float | None = None
    top_k: Whole | None = None
    top_n_tokens: Whole = 0
    top_p: float | None = None
    truncate: Whole | None = Field(None, description="Keep this many tokens at the end of the input.")


class TgiBody(Body):
    """``POST /``, ``/generate`` and ``/generate_stream``."""

    inputs: str
    parameters: dict[str, Any] = Field(default_factory=dict)
    stream: bool = False

    @property
    def asks_for(self) -> str | None:
        return self.model or Parameters.parse(self.parameters).adapter_id


async def generate(request: Request, body: TgiBody) -> Response:
    """Complete a text, at once or as a stream."""
    called = {**{name: name for name in SAME}, **OTHERS, "n": "best_of"}
    request.scope[FIELDS] = {"prompt": "inputs", **{name: f"parameters.{own}" for name, own in called.items()}}
    given, path = Parameters.parse(body.parameters), request.scope["path"]
    stream = body.stream or path == "/generate_stream"
    sampled = given.do_sample or any(getattr(given, name) is not None for name in ("temperature", "top_k", "top_p"))
    if (given.best_of or 1) > 1 and not sampled:
        raise wrong("parameters.best_of", "needs `do_sample`: greedy answers are all the same")
    fields: dict[str, Any] = {
        **({} if sampled else {"temperature": 0}),
        **{name: value for name in SAME if (value := getattr(given, name)) is not None},
        **{name: getattr(given, own) for name, own in OTHERS.items()},
        "prompt": body.inputs,
        "stream": stream,
        "model": given.adapter_id or body.model,
        "include_stop_str_in_output": True,
        "prompt_logprobs": 0 if given.decoder_input_details else None,
        "structured_outputs": None if given.grammar is None else _form(given.grammar),
    }
    one = await prepared(request, CompletionBody.parse(fields), path, DEFAULT_MAX_TOKENS)
    return await respond(request, stream, one.generation, _Generated(one, body.inputs, given, path == "/"))


def _form(grammar: dict[str, Any]) -> dict[str, Any]:
    kind, value = grammar.get("type"), grammar.get("value")
    if kind == "json_schema" and isinstance(value, dict):
        kind, value = "json", value.get("schema")
    if kind not in ("json", "regex"):
        where = "parameters.grammar.type"
        raise wrong(where, f"must be 'json', 'regex' or 'json_schema', got {clip(repr(kind))}")
    return {kind: value}


async def info(request: Request) -> dict[str, Any]:
    """What the server is and what it takes."""
    context = context_of(request)
    service = context.service
    return {
        "model_id": service.model_name,
        "model_dtype": service.metadata.get("dtype"),
        "model_device_type": service.manifest.backend,
        "model_pipeline_tag": "text-generation" if service.task == "generate" else service.task,
        "max_concurrent_requests": context.settings.max_queued_requests,
        "max_best_of": context.settings.max_choices,
        "max_stop_sequences": MAX_STOP_STRINGS,
        "max_input_tokens": service.max_len - 1,
        "max_total_tokens": service.max_len,
        "max_client_batch_size": 1,
        "router": "nxd_infer",
        "version": VERSION,
        **dict.fromkeys(("model_sha", "sha", "docker_label")),
    }


class _Generated(Answer):
    """The answer of these routes. A stream's last token comes with the whole text, so each waits for the next."""

    def __init__(self, one: Completion, inputs: str, given: Parameters, listed: bool):
        self._tokenizer, self._prompt, self._given, self._listed = one.tokenizer, one.prompts[0], given, listed
        self._another = functools.partial(_Generated, one, inputs, given, listed)
        self._text = inputs if given.return_full_text else ""
        self._ended: dict[str, Any] = {}
        self._logprob = 0.0
        """Of all tokens together."""
        self._prefill: list[dict[str, Any]] = []
        self._tokens: list[dict[str, Any]] = []
        self._top: list[list[dict[str, Any]]] = []

    def _token(self, token: int, logprob: float | None, text: str | None = None) -> dict[str, Any]:
        shown = self._tokenizer.token_text(token) if text is None else text
        number = None if logprob is None else finite(logprob)
        return {"id": token, "text": shown, "logprob": number, "special": token in self._tokenizer.special_ids}

    def _take(self, event: Given) -> None:
        if isinstance(event, PromptEvent):
            scores = [None, *(logprob for logprob, _ in event.scores)]
            self._prefill = [self._token(*one) for one in zip(self._prompt, scores, strict=True)]
            return
        self._text += event.text
        if isinstance(event, TokenEvent):
            self._logprob += event.logprob
            self._tokens.append(self._token(event.token, event.logprob, event.text))
            self._top.append([self._token(*one) for one in event.top])
        else:
            if self._tokens:
                self._tokens[-1]["text"] += event.text
            ended = "length" if event.reason == "length" else "eos_token" if event.stop is None else "stop_sequence"
            self._ended = {"finish_reason": ended, "generated_tokens": len(self._tokens), "seed": self._given.seed}

    @property
    def _details(self) -> dict[str, Any]:
        return {**self._ended, "prefill": self._prefill, "tokens": self._tokens, "top_tokens": self._top}

    async def whole(self, generation: Generation) -> Response:
        choices = [self, *(self._another() for _ in range(generation.choices - 1))]
        async with generation:
            while generation.unfinished:
                if (item := await generation.next()) is not None:
                    choices[item[0]]._take(item[1])
        best, *others = sorted(choices, key=lambda one: -one._logprob / max(1, len(one._tokens)))
        best._prefill = self._prefill  # the first choice's, for all of them
        answer: dict[str, Any] = {"generated_text": best._text}
        if self._given.details or self._given.decoder_input_details:
            answer["details"] = best._details
            if others:
                rest = [{"generated_text": one._text, **one._details} for one in others]
                answer["details"]["best_of_sequences"] = rest
        return Response(encode([answer] if self._listed else answer), media_type="application/json")

    def event(self, choice: int, event: Given) -> bytes:
        self._take(event)
        ended = isinstance(event, FinishEvent)
        place = len(self._tokens) - (not ended)
        if place < 1:
            return b""
        nothing = {"generated_text": None, "details": None}
        shown: dict[str, Any] = {"index": place, "token": self._tokens[place - 1], **nothing}
        if self._given.top_n_tokens:
            shown["top_tokens"] = self._top[place - 1]
        if ended:
            shown |= {"generated_text": self._text, "details": {**self._ended, "input_length": len(self._prompt)}}
        return b"data:" + encode(shown) + b"\n\n"

    def failure(self, refusal: ApiError) -> bytes:
        return b"data:" + encode(refusal.tgi_body()) + b"\n\n"
