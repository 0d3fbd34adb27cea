"""``/v1/responses``: a conversation as items, which the server can keep for the next request."""

from __future__ import annotations

import secrets
import time
import uuid
from typing import Any, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse

from nxd_infer.artifact.sampler_fields import SAMPLER_FIELDS
from nxd_server.engine.request import Usage
from nxd_server.errors import MaxTokensError, PromptTooLongError, TextTooLongError
from nxd_server.http.blocks import Block, BlockAnswer, sse
from nxd_server.http.error_responses import ApiError, bad_request, check_fields, clip, unsupported, wrong
from nxd_server.http.openai.chat import Conversation, conversation
from nxd_server.http.openai.generation import respond
from nxd_server.http.openai.response_items import checked_items, id_of, item_of, messages_of, part_of
from nxd_server.http.openai.schemas import MOST_MESSAGES, ChatBody, SamplerBody, StreamOptions
from nxd_server.http.request_body import MOST_VARIABLES, Listed, Neutral, Templated, Whole, equals, is_empty, is_one_of
from nxd_server.http.request_context import Context, context_of
from nxd_server.http.scope_keys import FIELDS

ROUTE = "/v1/responses"
TOOL_FIELDS = frozenset({"type", "name", "description", "parameters", "strict"})
AS_GIVEN = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "truncation")
"""Fields of a request that its response has, too."""
OWN_FIELDS = {
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
"""What the fields of a chat are called here."""


class ResponsesBody(SamplerBody, Templated):
    """``POST /v1/responses``."""

    HARMLESS: ClassVar[frozenset[str]] = (
        ChatBody.HARMLESS | {"max_tool_calls", "client_metadata", "prompt_cache_diagnostics"}
    ) - {"metadata"}
    NEUTRAL: ClassVar[Neutral] = {
        **dict.fromkeys(("conversation", "prompt", "context_management", "moderation"), is_empty),
        "background": is_one_of(False),
        "service_tier": is_one_of("auto", "default"),
        "top_logprobs": equals(0),
    }

    input: Any = Field(..., description="Text, or a list of items: messages, calls, their outputs, reasoning.")
    instructions: str | None = Field(None, description="The system's message, of this request only.")
    previous_response_id: str | None = Field(None, description="Of a stored response that this one continues.")
    store: bool = Field(True, description="Keep the response in the server's memory.")
    stream: bool = Field(False, description="Answer as server-sent events.")
    stream_options: StreamOptions | None = None
    max_output_tokens: Whole | None = Field(None, description="Most tokens to generate.")
    metadata: dict[str, str] = Field(default_factory=dict, max_length=16, description="Returned as it is.")
    tool_choice: Any = Field(None, description="auto, required, none, a function's name, or allowed_tools.")
    parallel_tool_calls: bool | None = Field(None, description="False: at most one call in an answer.")
    text: dict[str, Any] = Field(default_factory=dict, description="Its format: text, json_object or json_schema.")
    reasoning: dict[str, Any] = Field(default_factory=dict, description="Its effort; of a summary only auto, for none.")
    truncation: Literal["auto", "disabled"] = Field("disabled", description="auto: forget the oldest turns to fit.")
    include: Listed[str] = Field(default_factory=list, max_length=MOST_VARIABLES)
    seed: Whole | None = Field(None, description="The same seed gives the same answer; -1: a random one.")


async def responses(request: Request, body: ResponsesBody) -> Any:
    """Answer a conversation, at once or as a stream."""
    context = context_of(request)
    owner = context.keys.owner(request.scope)
    before = _previous(context, owner, body)
    items = checked_items(body.input, lambda id: context.responses.item(owner, id))
    if len(before) + len(items) > MOST_MESSAGES:
        raise wrong("input", f"has {len(items)} items; a conversation may have {MOST_MESSAGES}")
    single = isinstance(body.input, str)
    places = ["previous_response_id"] * len(before)
    places += ["input" if single else f"input[{place}]" for place in range(len(items))]
    messages, origins = messages_of(body.instructions, [*before, *items], places)
    chat = _chat_fields(body)
    while True:
        named = {f"messages[{place}]": origin for place, origin in enumerate(origins)}
        tools = {f"tools[{place}].function": f"tools[{place}]" for place in range(len(body.tools))}
        request.scope[FIELDS] = {**OWN_FIELDS, **tools, **named, "messages": "input", "prompt": "input"}
        try:
            one = await conversation(request, ChatBody.parse({**chat, "messages": messages}), ROUTE)
            break
        except (MaxTokensError, PromptTooLongError, TextTooLongError):
            kept = _shorter(messages) if body.truncation == "auto" else None
            if kept is None:
                raise
            messages, origins = [messages[place] for place in kept], [origins[place] for place in kept]
    answer = _Response(one, body, context, owner, [*before, *items])
    return await respond(request, body.stream, one.generation, answer)


def _previous(context: Context, owner: bytes, body: ResponsesBody) -> list[dict[str, Any]]:
    """Return the items of the conversation that the request continues. Raises ApiError 400 if it is not stored."""
    if body.previous_response_id is None:
        return []
    found = context.responses.get(owner, body.previous_response_id)
    if found is None:
        raise bad_request(
            f"`previous_response_id`: the response {clip(body.previous_response_id)!r} is not stored; send the whole "
            "conversation as `input`",
            "previous_response_id",
            "previous_response_not_found",
        )
    return [*found[1], *found[0]["output"]]


def _shorter(messages: list[dict[str, Any]]) -> list[int] | None:
    """Return which messages to keep, without the oldest quarter of the turns; None if there is one turn only."""
    turns = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if len(turns) < 2:
        return None
    first = turns[(len(turns) + 3) // 4]
    system = [place for place in range(turns[0]) if messages[place]["role"] in ("system", "developer")]
    return [*system, *range(first, len(messages))]


def _chat_fields(body: ResponsesBody) -> dict[str, Any]:
    """Return the fields of a chat that ask for the same, without its messages. Raises ApiError 400."""
    tools = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(body.tools)]
    for name, given in body.reasoning.items():
        if name != "effort" and not (name in ("summary", "generate_summary") and given in (None, "auto")):
            raise unsupported(f"reasoning.{clip(name)}", "reasoning is shown as it is")
    if "message.output_text.logprobs" in body.include:
        raise unsupported("include", "log-probabilities are returned by /v1/chat/completions")
    given = {name: value for name in SAMPLER_FIELDS if (value := getattr(body, name)) is not None}
    return {
        **given,
        "model": body.model,
        "stream": body.stream,
        "max_completion_tokens": body.max_output_tokens,
        "tools": tools,
        "tool_choice": body.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _format(body.text),
        "reasoning_effort": body.reasoning.get("effort"),
        "seed": body.seed,
        "chat_template_kwargs": body.chat_template_kwargs,
    }


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if (kind := tool.get("type")) != "function":
        why = f"this server runs no tools, so only functions are taken, not {clip(repr(kind))}"
        raise unsupported(f"{where}.type", why)
    check_fields(tool, TOOL_FIELDS, where)
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _format(text: dict[str, Any]) -> dict[str, Any] | None:
    """Return ``text.format`` as a chat's ``response_format``."""
    check_fields(text, frozenset({"format", "verbosity"}), "text")
    if text.get("verbosity") not in (None, "medium"):
        raise unsupported("text.verbosity")
    form = text.get("format")
    if form is None:
        return None
    if not isinstance(form, dict):
        raise wrong("text.format", "must be an object")
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


class _Response(BlockAnswer):
    """The answer of ``POST /v1/responses``."""

    def __init__(
        self, one: Conversation, body: ResponsesBody, context: Context, owner: bytes, items: list[dict[str, Any]]
    ):
        """``items``: the conversation so far."""
        super().__init__(one)
        self._body, self._store, self._owner, self._items = body, context.responses, owner, items
        self._stores = body.store and context.responses.keeps
        self._pads = bool(body.stream_options and body.stream_options.include_obfuscation)
        self._number = 0
        params = one.params
        self._fields: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            **dict.fromkeys(("completed_at", "error", "incomplete_details", "max_tool_calls", "usage")),
            **{name: getattr(body, name) for name in AS_GIVEN},
            "background": False,
            "model": one.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {"effort": body.reasoning.get("effort"), "summary": None},
            "service_tier": "default",
            "store": self._stores,
            "temperature": params.temperature,
            "text": {"format": body.text.get("format") or {"type": "text"}, "verbosity": "medium"},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": [{"strict": None, "parameters": None, "description": None, **tool} for tool in body.tools],
            "top_logprobs": 0,
            "top_p": params.top_p,
        }

    def object(self, usage: Usage) -> dict[str, Any]:
        cut = self.reason == "length"
        counts = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }
        response = {
            **self._fields,
            "status": "incomplete" if cut else "completed",
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output,
            "usage": counts,
        }
        if self._stores:
            self._store.put(self._owner, response, self._items)
        return response

    @property
    def _output(self) -> list[dict[str, Any]]:
        return [item_of(block, self._status(block)) for block in self.blocks]

    def _status(self, block: Block) -> str:
        last = block.index == len(self.blocks) - 1
        cut = self.reason == "length" or (block.kind == "call" and not self.one.parts[0].called)
        return "incomplete" if last and cut else "completed"

    def begin(self, weight_version: int | None) -> bytes:
        return self._event("created", response=self._fields) + self._event("in_progress", response=self._fields)

    def end(self, usage: Usage) -> bytes:
        response = self.object(usage)
        return self._event(response["status"], response=response)

    def failure(self, refusal: ApiError) -> bytes:
        error = {"code": refusal.code, "message": refusal.message}
        failed = {**self._fields, "status": "failed", "error": error, "output": self._output}
        return self._event("failed", response=failed)

    def show(self, what: str, block: Block, text: str) -> bytes:
        place: dict[str, Any] = {"item_id": id_of(block), "output_index": block.index}
        part = {**place, "content_index": 0}
        item: dict[str, Any] = {"output_index": block.index}
        name, whole = {
            "reasoning": ("reasoning_text", "text"),
            "text": ("output_text", "text"),
            "call": ("function_call_arguments", "arguments"),
        }[block.kind]
        own = place if block.kind == "call" else part
        more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if what == "delta":
            if self._pads:
                more["obfuscation"] = secrets.token_hex(16)[: 32 - len(text) % 16]
            return self._event(f"{name}.delta", **own, delta=text, **more)
        if what == "start":
            events = self._event("output_item.added", **item, item=item_of(block, "in_progress"))
            if block.kind != "call":
                events += self._event("content_part.added", **part, part=part_of(block, ""))
            return events
        if block.kind == "call":
            more = {"name": block.name}
        events = self._event(f"{name}.done", **own, **{whole: block.text}, **more)
        if block.kind != "call":
            events += self._event("content_part.done", **part, part=part_of(block, block.text))
        return events + self._event("output_item.done", **item, item=item_of(block, self._status(block)))

    def _event(self, event: str, /, **fields: Any) -> bytes:
        kind, number = f"response.{event}", self._number
        self._number += 1
        return sse(kind, {"type": kind, "sequence_number": number, **fields})


# --- stored responses ---


async def get_response(request: Request, response_id: str) -> JSONResponse:
    """Return a stored response."""
    _check_query(request, ())
    return JSONResponse(_stored(request, response_id)[0])


async def delete_response(request: Request, response_id: str) -> JSONResponse:
    """Forget a stored response."""
    _stored(request, response_id)
    context = context_of(request)
    context.responses.remove(context.keys.owner(request.scope), response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def list_input_items(request: Request, response_id: str) -> JSONResponse:
    """Return what a stored response answers, the newest first, or the oldest with ``order=asc``."""
    _check_query(request, ("limit", "order", "after"))
    query = request.query_params
    items = _stored(request, response_id)[1]
    limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= 100):
        raise wrong("limit", "must be from 1 to 100")
    if order not in ("asc", "desc"):
        raise wrong("order", "must be asc or desc")
    if order == "desc":
        items = items[::-1]
    if after is not None:
        place = next((place for place, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise bad_request(f"`after`: there is no item {clip(after)!r}", "after")
        items = items[place + 1 :]
    data = items[: int(limit)]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return JSONResponse({"object": "list", "data": data, **ends, "has_more": len(items) > len(data)})


def _stored(request: Request, id: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    context = context_of(request)
    found = context.responses.get(context.keys.owner(request.scope), id)
    if found is None:
        raise ApiError(404, f"the response {clip(id)!r} is not stored", param="response_id")
    return found


def _check_query(request: Request, known: tuple[str, ...]) -> None:
    """Raise ApiError 400 for a parameter that would change the answer."""
    for name, value in request.query_params.items():
        if name not in known and (name, value.lower()) != ("stream", "false") and not name.startswith("include"):
            raise unsupported(clip(name))
