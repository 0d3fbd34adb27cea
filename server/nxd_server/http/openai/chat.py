"""``POST /v1/chat/completions``."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from nxd_server.engine.request import FinishEvent, PromptEvent, TokenEvent, max_new_tokens, truncation
from nxd_server.engine.sampling_params import SamplingParams
from nxd_server.errors import RequestError
from nxd_server.http.error_responses import bad_request, clip, missing_field, unknown_field, unsupported, wrong
from nxd_server.http.openai.generation import Choices, Generation, Given, check_choices, respond, with_limit
from nxd_server.http.openai.logprobs import chat_logprob
from nxd_server.http.openai.schemas import ChatBody
from nxd_server.http.openai.tools import (
    ChoiceCalls,
    choice_calls,
    chosen,
    no_tools,
    offered_tools,
    requested_form,
    schemas_of,
    with_calls,
)
from nxd_server.http.request_body import Conversational
from nxd_server.http.request_context import (
    Context,
    compiled_grammar,
    context_of,
    encode_text,
    require_task,
    unless_left,
)
from nxd_server.http.scope_keys import IGNORED
from nxd_server.text.chat_template import RESERVED
from nxd_server.text.reasoning import Place, ReasoningCounter, ReasoningReader, free_reasoning, place_behind
from nxd_server.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nxd_server.app.service import Service
    from nxd_server.text.grammars import CompiledGrammar

ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGE_FIELDS = frozenset({"role", "content", "name"})
ROLE_FIELDS = {
    "assistant": frozenset({"tool_calls", "reasoning_content", "reasoning"}),
    "tool": frozenset({"tool_call_id"}),
}
"""Further fields, by role."""
SWITCHES = {
    "enable_thinking": r"\benable_thinking\b",
    "thinking": r"\bthinking is (not )?defined\b|\bif (not )?thinking\b",
}
"""The variables by which chat templates turn reasoning on and off, and how they are read."""
OF_CLIENTS = "provider_specific_fields"
"""LiteLLM's copy of what an answer has besides OpenAI's fields, which it sends back."""
MESSAGE_UNSUPPORTED = frozenset(
    {"tool_calls", "tool_call_id", "function_call", "audio", "refusal", "reasoning_content", "reasoning", "annotations"}
)


def check_messages(messages: list[dict[str, Any]], tool_format: str | None) -> list[dict[str, Any]]:
    """Return the messages for the template; ``developer`` is OpenAI's newer name for ``system``.

    ``tool_format``: of the model's tool calls; without one, no message may hold any. The reasoning of earlier answers,
    ``reasoning_content`` or vLLM's ``reasoning``, is for the template to show or not.

    Raises:
        ApiError: 400 naming the message's field. (``content`` is checked when it is rendered.)
    """
    if not messages:
        raise wrong("messages", "must hold at least one message")
    checked: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        where, role = f"messages[{place}]", message.get("role")
        known = MESSAGE_FIELDS | (ROLE_FIELDS.get(role, frozenset()) if isinstance(role, str) else frozenset())
        for name, value in message.items():
            if value is None or name in known or name == OF_CLIENTS:
                continue
            if name in MESSAGE_UNSUPPORTED:
                if value not in ([], {}, ""):
                    raise unsupported(f"{where}.{name}")
                continue
            raise unknown_field(f"{where}.{clip(name)}", known)
        if role == "function":
            raise unsupported(f"{where}.role", "use messages of the role 'tool'")
        if role not in ROLES:
            raise wrong(f"{where}.role", f"must be one of {', '.join(ROLES)}")
        if tool_format is None and role == "tool":
            raise no_tools(f"{where}.role")
        if tool_format is None and message.get("tool_calls"):
            raise no_tools(f"{where}.tool_calls")
        kept = {name: value for name, value in message.items() if name in known and value is not None}
        thought = kept.pop("reasoning", None) or kept.pop("reasoning_content", None)
        if thought:
            kept["reasoning_content"] = thought
        for name in ("name", "tool_call_id", "reasoning_content"):
            if not isinstance(kept.get(name), (str, type(None))):
                raise wrong(f"{where}.{name}", "must be a string")
        if not kept.get("tool_calls", True):
            del kept["tool_calls"]  # an empty list is none to templates, too
        if thought and "tool_calls" not in kept:
            kept.setdefault("content", "")  # an answer that was cut while it reasoned has no other
        elif "content" not in kept and "tool_calls" not in kept:
            if "content" not in message:
                raise missing_field(f"{where}.content")
            kept["content"] = ""
        checked.append({**kept, "role": "system" if role == "developer" else role})
    return checked


async def chat_text(
    service: Any,
    body: Conversational,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    tools: list[dict[str, Any]],
) -> str:
    """Return the ``messages`` of a body as rendered by the model's template, which is shown its documents, and what is
    left of its ``tools``."""
    begin, go_on = body.add_generation_prompt, body.continue_final_message
    if begin and go_on:
        raise bad_request(
            "`continue_final_message` goes on with a message, and `add_generation_prompt` begins one: send one of them",
            "continue_final_message",
        )
    template = service.chat_template
    if template is None:
        why = f"{service.model_name!r} has no chat template; use /v1/completions"
        raise bad_request(why, "messages", "no_chat_template")
    for name in variables:
        if name in RESERVED or not name.isidentifier():
            raise wrong("chat_template_kwargs", f"must not set {clip(name)!r}")

    most = service.require_tokenizer().most_characters(service.max_len)
    checked = check_messages(messages, service.tool_format)
    shown: dict[str, Any] = {name: given for name, given in (("tools", tools), ("documents", body.documents)) if given}
    shown |= {"continue_final_message": True} if go_on else {"add_generation_prompt": begin is not False}
    return await template.render(checked, {**variables, **shown}, most)


async def chat_prompt(
    context: Context, body: ChatBody, tools: list[dict[str, Any]], last: int | None = None
) -> tuple[list[int], Place]:
    """Return the conversation's token ids, or the ``last`` of them, and where in its reasoning the answer begins."""
    service = context.service
    variables = {**_effort(service, body.reasoning_effort), **body.chat_template_kwargs}
    text = await chat_text(service, body, body.messages, variables, tools)
    tokens = await encode_text(context, text, "messages", special=False, last=last)
    if not tokens:
        raise wrong("messages", "render to no tokens")
    tags = service.reasoning_tags
    return tokens, place_behind(text, tags) if tags is not None else "over"


async def chat(request: Request, body: ChatBody) -> Any:
    """Answer a chat request, at once or as a stream."""
    one = await conversation(request, body, "/v1/chat/completions")
    return await respond(request, body.stream, one.generation, _ChatCompletion(one, body))


@dataclass(frozen=True)
class Conversation:
    """A request that continues a conversation, ready to run."""

    generation: Generation
    model: str
    """The name of what answers."""
    tokenizer: Tokenizer
    params: SamplingParams
    prompt: list[int]
    parts: list[MessageParts]
    """Of each choice."""


async def conversation(request: Request, body: ChatBody, route: str) -> Conversation:
    """Check a request of ``route`` and prepare its answer. Raises ApiError and RequestError."""
    context, service = context_of(request), require_task(request, route, "generate")
    adapter = service.adapter_named(body.model)
    body.check_stream_options()
    if body.stream and body.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "in a stream")
    choice, offered = chosen(body.tool_choice, body.tools)
    body = body.model_copy(update={"tool_choice": choice, "tools": offered})
    top = _top_logprobs(body, service.top_logprobs)
    limits = {"max_completion_tokens": body.max_completion_tokens, "max_tokens": body.max_tokens}
    field, limit = next(((name, given) for name, given in limits.items() if given is not None), ("max_tokens", None))
    if body.max_tokens not in (None, limit):
        raise wrong("max_tokens", "and `max_completion_tokens` differ; they are one limit: send one")
    if limit is not None and limit < 1:
        raise wrong(field, f"must be at least 1, got {limit}")
    check_choices(1, body.n, context.settings.max_choices, service.room)
    defaults = service.sampling_defaults
    params = body.sampling(limit, top, defaults)  # a wrong value: before a long conversation is tokenized
    last = truncation(body.truncate_prompt_tokens, service.max_len, limit)
    tokenizer, tools, grammar = service.require_tokenizer(), [], None
    if body.reasoning_effort not in (None, "none") and not _effort(service, body.reasoning_effort):
        request.scope[IGNORED] = [*request.scope.get(IGNORED, ()), "reasoning_effort"]
    if body.tools or body.tool_choice is not None:
        tools = offered_tools(body.tools, body.tool_choice, service.tool_format)
    if tools or body.constrained:
        grammar = await _grammar(request, body, params, tools)
    tokens, place = await unless_left(request, chat_prompt(context, body, tools, last))
    tags = service.reasoning_tags
    if grammar is not None and tags is not None:
        free = free_reasoning(tokenizer, service.vocab_size, tags, place)
        grammar, place = (grammar, "over") if free is None else (grammar.behind(free), place)
    room = max_new_tokens(limit, len(tokens), service.max_len, field)
    params = with_limit(params, room) if limit is None else params
    parts = []
    for calls in choice_calls(body, tools, service.tool_format) if tools else [None] * body.n:
        reads = tags if place != "over" else None
        reader = reads and ReasoningReader(reads, place, exact=grammar is not None)
        counter = tags and ReasoningCounter(tags, place, tokenizer.token_text)
        parts.append(MessageParts(reader, body.include_reasoning, calls, counter))
    generation = Generation(request, [tokens], [params], adapter, grammar)
    return Conversation(generation, adapter or service.model_name, tokenizer, params, tokens, parts)


async def _grammar(
    request: Request, body: ChatBody, params: SamplingParams, tools: list[dict[str, Any]]
) -> CompiledGrammar | None:
    """Return the grammar that the answer follows, if any. Raises ApiError and RequestError."""
    service, requested = context_of(request).service, requested_form(body)
    form = with_calls(body, requested, tools, service.tool_format, service.require_tokenizer(), service.vocab_size)
    try:
        return await compiled_grammar(request, params.replace(structured_outputs=form))
    except RequestError:
        for part in (*([requested] if requested else []), *schemas_of(tools)):
            await compiled_grammar(request, SamplingParams(structured_outputs=part))  # its error says where
        raise


def thinking_switch(service: Service) -> str | None:
    """Return the variable by which the model's chat template turns reasoning on and off; None if there is none."""
    source = "" if service.chat_template is None else service.chat_template.source
    return next((name for name, pattern in SWITCHES.items() if re.search(pattern, source)), None)


def _effort(service: Service, effort: str | None) -> dict[str, Any]:
    """Return the template's variables that ask for an effort; none if it always reasons alike. Raises ApiError 400."""
    if effort is None:
        return {}
    if service.chat_template is not None and re.search(r"\breasoning_effort\b", service.chat_template.source):
        return {"reasoning_effort": effort}
    if service.reasoning_tags is not None and (switch := thinking_switch(service)) is not None:
        return {switch: effort != "none"}
    if (effort == "none") == (service.reasoning_tags is None):
        return {}
    why = (
        "this model does not reason (see reasoning_parser): leave it out, or send 'none'"
        if service.reasoning_tags is None
        else "this model always reasons, as its chat template has no switch for it"
    )
    raise unsupported("reasoning_effort", why)


def _top_logprobs(body: ChatBody, most: int) -> int | None:
    """Return how many alternatives to request from the engine; ``None`` without log-probabilities."""
    if body.top_logprobs is not None:
        if not 0 <= body.top_logprobs <= most:
            raise wrong("top_logprobs", f"must be from 0 to {most}, got {body.top_logprobs}")
        if body.top_logprobs and not body.logprobs:
            raise wrong("top_logprobs", "needs `logprobs` to be true")
    return (body.top_logprobs or 0) if body.logprobs else None


class MessageParts:
    """Reads the text of one choice."""

    def __init__(
        self,
        reasoning: ReasoningReader | None,
        shown: bool,
        calls: ChoiceCalls | None,
        counter: ReasoningCounter | None = None,
    ):
        """``reasoning``, ``calls`` None: the answer has none. ``shown``: whether the message is to have the
        reasoning. ``counter`` None: the model does not reason."""
        self._reasoning, self._shown, self._calls = reasoning, shown, calls
        self.counter = counter
        self._thoughts: list[str] = []

    def take(self, text: str, ended: bool = False) -> dict[str, Any]:
        """Return what the next piece of text adds to the message, as the delta of a chunk; only parts that it has."""
        thought = ""
        if self._reasoning is not None:
            thought, text = self._reasoning.feed(text)
            if ended:
                more, rest = self._reasoning.end()
                thought, text = thought + more, text + rest
        calls: list[dict[str, Any]] = []
        if self._calls is not None:
            text, calls = self._calls.take(text, ended)
            if self._calls.optional and self._reasoning is not None and self._reasoning.place != "over":
                self._thoughts.append(thought)
                if ended:  # some models call a tool and leave the reasoning open
                    _, calls = self._calls.take("".join(self._thoughts), ended)
        thought = thought if self._shown else ""
        parts = {"reasoning": thought, "reasoning_content": thought, "content": text, "tool_calls": calls}
        return {name: part for name, part in parts.items() if part}

    def count(self, token: int) -> None:
        """Count a token of the answer; one that ends it is none."""
        if self.counter is not None:
            self.counter.take(token)

    def whole(self, text: str) -> dict[str, Any]:
        """Return the message of a choice with this text."""
        parts = self.take(text, ended=True)
        none = {"refusal": None, "reasoning": None, "reasoning_content": None}
        message = {"role": "assistant", "content": "", **none, **parts}
        calls = parts.get("tool_calls")
        if (calls or (self._calls is not None and self._calls.forced)) and not message["content"].strip():
            message["content"] = None
        if calls:
            message["tool_calls"] = [{name: call[name] for name in call if name != "index"} for call in calls]
        return message

    @property
    def called(self) -> bool:
        """Whether the choice holds calls, all of them complete."""
        return self._calls is not None and self._calls.called

    def reason(self, reason: str) -> str:
        """Return the choice's finish reason, from the engine's."""
        return reason if self._calls is None else self._calls.reason(reason)


class _ChatCompletion(Choices):
    """The answer of ``/v1/chat/completions``."""

    WHOLE, CHUNK = "chat.completion", "chat.completion.chunk"

    def __init__(self, one: Conversation, body: ChatBody):
        super().__init__("chatcmpl", one.model, body, [one.prompt])
        self._tokenizer, self._top, self._parts = one.tokenizer, one.params.logprobs, one.parts
        self._logprobs: list[list[dict]] = [[] for _ in one.parts]
        """Of each choice of a whole answer."""

    def token(self, choice: int, event: TokenEvent) -> None:
        self._parts[choice].count(event.token)
        if self._top is not None:
            self._logprobs[choice].append(chat_logprob(self._tokenizer, event, self._top))

    def choice(self, choice: int, text: str, reason: str) -> dict[str, Any]:
        own, content = self._parts[choice], self._logprobs[choice]
        return {
            "message": own.whole(text),  # first: the finish reason depends on it
            "logprobs": None if self._top is None else {"content": content, "refusal": None},
            "finish_reason": own.reason(reason),
        }

    def about_prompt(self) -> dict[str, Any]:
        found: dict[str, Any] = {"prompt_token_ids": self.prompts[0]} if self.returns_ids else {}
        return {**found, "prompt_logprobs": self._scores[0]} if self._scores else found

    @property
    def reasoning_tokens(self) -> int | None:
        counters = [own.counter for own in self._parts if own.counter is not None]
        return sum(counter.count for counter in counters) if counters else None

    def opening(self) -> bytes:
        first = {"role": "assistant", "content": "", "refusal": None}
        ids = f',"prompt_token_ids":{json.dumps(self.prompts[0])}' if self.returns_ids else ""
        return b"".join(self.chunk(choice, f'"delta":{json.dumps(first)}{ids}') for choice in range(self._n))

    def event(self, choice: int, event: Given) -> bytes:
        if isinstance(event, PromptEvent):
            return b""
        own = self._parts[choice]
        delta = own.take(event.text, ended=isinstance(event, FinishEvent))
        if isinstance(event, FinishEvent):
            held = self._delta(choice, delta) if delta else b""
            return held + self._delta(choice, {}, reason=own.reason(event.reason))
        self.count(choice)
        if not event.is_stop:
            own.count(event.token)
        if self._top is not None and not event.is_stop:
            logprobs = {"content": [chat_logprob(self._tokenizer, event, self._top)], "refusal": None}
            return self._delta(choice, {"content": "", **delta}, logprobs=logprobs, event=event)
        return self._delta(choice, delta, event=event) if delta or self.returns_ids else b""

    def _delta(self, choice: int, delta: dict[str, Any], **more: Any) -> bytes:
        return self.chunk(choice, f'"delta":{json.dumps(delta)}', **more)
