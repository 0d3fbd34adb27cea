"""``/v1/messages``: Anthropic's form of a chat."""

from __future__ import annotations

import json
import uuid
from typing import Any, ClassVar

from pydantic import Field
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse

from nxd_infer.artifact.sampler_fields import SAMPLER_FIELDS
from nxd_server.engine.request import Usage
from nxd_server.http.blocks import Block, BlockAnswer, check_answers, sse, text_parts
from nxd_server.http.error_responses import NO_THREADS, ApiError, check_fields, clip, missing_field, unsupported, wrong
from nxd_server.http.openai.chat import Conversation, chat_prompt, conversation, thinking_switch
from nxd_server.http.openai.generation import respond
from nxd_server.http.openai.schemas import MOST_MESSAGES, ChatBody, SamplerBody
from nxd_server.http.openai.tools import offered_tools
from nxd_server.http.request_body import Body, Listed, Neutral, Templated, Whole, is_empty, is_one_of
from nxd_server.http.request_context import context_of, require_task, unless_left
from nxd_server.http.scope_keys import FIELDS, REQUEST_ID

BLOCK_FIELDS = {
    "text": frozenset({"type", "text", "cache_control", "citations"}),
    "thinking": frozenset({"type", "thinking", "signature"}),
    "tool_use": frozenset({"type", "id", "name", "input", "cache_control", "caller"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error", "cache_control"}),
}
"""By the type of a content block."""
OF_ROLE = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use")}
TOOL_FIELDS = frozenset(
    {"type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming"}
)


def _edits_nothing(management: Any) -> bool:
    """Whether what `context_management` asks for is to keep all thinking, as Claude Code does."""
    edits = management.get("edits") if isinstance(management, dict) else None
    kept = {"type": "clear_thinking_20251015", "keep": "all"}
    return is_empty(management) or (isinstance(edits, list) and all(edit == kept for edit in edits))


class CountBody(SamplerBody, Templated):
    """``POST /v1/messages/count_tokens``."""

    HARMLESS: ClassVar[frozenset[str]] = Body.HARMLESS | {"cache_control", "inference_geo", "user_profile_id"}
    NEUTRAL: ClassVar[Neutral] = {
        **dict.fromkeys(("container", "mcp_servers", "stream_options"), is_empty),
        "context_management": _edits_nothing,
        "service_tier": is_one_of("auto", "standard_only"),
        "speed": is_one_of("standard"),
    }

    messages: Listed[dict[str, Any]] = Field(
        ..., max_length=MOST_MESSAGES, description="Turns of user and assistant, whose content is text or blocks."
    )
    system: Any = Field(None, description="Text, or a list of blocks of text.")
    tool_choice: dict[str, Any] | None = Field(None, description="Of the type auto, any, tool or none.")
    thinking: dict[str, Any] | None = Field(None, description="enabled or disabled; budget_tokens are no strict limit.")
    output_config: dict[str, Any] = Field(default_factory=dict, description="Its format: json_schema, with a schema.")


class MessagesBody(CountBody):
    """``POST /v1/messages``."""

    max_tokens: Whole = Field(..., description="Most tokens to generate.")
    stop_sequences: Listed[str] = Field(default_factory=list, max_length=64, description="Strings that end the text.")
    stream: bool = Field(False, description="Answer as server-sent events.")
    thread: dict[str, Any] | None = Field(None, description="Refused, after which clients send whole conversations.")


async def messages(request: Request, body: MessagesBody) -> Any:
    """Answer a conversation, at once or as a stream."""
    if body.thread is not None:
        words = "`thread` is not supported by this server: send the whole conversation"
        raise ApiError(400, words, param="thread", code=NO_THREADS)
    chat = _chat_body(request, body)
    more = {"max_tokens": body.max_tokens, "stop": body.stop_sequences or None, "stream": body.stream}
    one = await conversation(request, ChatBody.parse({**chat, **more}), "/v1/messages")
    return await respond(request, body.stream, one.generation, _Message(one, request.scope[REQUEST_ID]))


async def count_tokens(request: Request, body: CountBody) -> JSONResponse:
    """Return how many tokens the prompt of a conversation has."""
    service = require_task(request, "/v1/messages/count_tokens", "generate")
    chat = ChatBody.parse(_chat_body(request, body))
    tools = offered_tools(chat.tools, chat.tool_choice, service.tool_format) if chat.tools else []
    tokens, _ = await unless_left(request, chat_prompt(context_of(request), chat, tools))
    return JSONResponse({"input_tokens": len(tokens)})


def _chat_body(request: Request, body: CountBody) -> dict[str, Any]:
    """Return the fields of a chat that ask for the same. Raises ApiError 400."""
    said, origins = _messages(body)
    named = {f"messages[{place}]": origin for place, origin in enumerate(origins)}
    tools = {f"tools[{place}].function": f"tools[{place}]" for place in range(len(body.tools))}
    schemas = {f"tools[{n}].function.parameters": f"tools[{n}].input_schema" for n in range(len(body.tools))}
    own = {"stop": "stop_sequences", "response_format": "output_config.format", "prompt": "messages"}
    own["response_format.json_schema"] = "output_config.format"
    request.scope[FIELDS] = {**own, **tools, **schemas, **named}
    choice, parallel = _choice(body.tool_choice)
    return {
        **{name: value for name in SAMPLER_FIELDS if (value := getattr(body, name)) is not None},
        "model": body.model,
        "messages": said,
        "continue_final_message": said[-1]["role"] == "assistant",
        "tools": [_tool(tool, f"tools[{place}]") for place, tool in enumerate(body.tools)],
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "response_format": _format(body.output_config),
        "chat_template_kwargs": {**_thinking(request, body.thinking), **body.chat_template_kwargs},
    }


def _messages(body: CountBody) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the messages of a chat, and where each comes from. Turns of one role are one, as in Anthropic's API."""
    if not body.messages:
        raise wrong("messages", "must hold at least one message")
    found: list[dict[str, Any]] = []
    origins: list[str] = []
    system = _check_blocks(body.system, "system", ("text",)) if body.system else []
    for place, message in enumerate(body.messages):
        where, role = f"messages[{place}]", message.get("role")
        check_fields(message, frozenset({"role", "content"}), where)
        if role == "system" and found:  # Claude Code's; most templates take it at the beginning only
            system = [*system, *_check_blocks(message.get("content"), f"{where}.content", ("text",))]
            continue
        if role not in OF_ROLE:
            raise wrong(f"{where}.role", "must be 'user' or 'assistant'; the system's text is `system`")
        if message.get("content") is None:
            raise missing_field(f"{where}.content")
        content = _check_blocks(message["content"], f"{where}.content", OF_ROLE[role])
        for one in _turn(content, f"{where}.content") if role == "user" else [_answer(content)]:
            if found and one["role"] == found[-1]["role"] == "user":
                found[-1]["content"] += one["content"]
                continue
            found.append(one)
            origins.append(where)
    if found[-1]["role"] == "assistant" and (not found[-1]["content"] or "tool_calls" in found[-1]):
        raise unsupported(f"{origins[-1]}.content", "an answer is continued that ends with text, and calls no tool")
    for one in found:
        if one["role"] == "user" and len(one["content"]) == 1:
            one["content"] = one["content"][0]["text"]
    if system:
        found.insert(0, {"role": "system", "content": text_parts(system, "system", ("text",))})
        origins.insert(0, "system")
    check_answers(found, origins, "content")
    return found, origins


def _check_blocks(content: Any, where: str, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return content as a list of blocks. Raises ApiError 400 naming what is of none of these ``kinds``."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not content:
        raise wrong(where, "must be a string or a non-empty list of blocks")
    for place, block in enumerate(content):
        path = f"{where}[{place}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in kinds:
            raise unsupported(f"{path}.type", f"here blocks are {', '.join(kinds)}; got {clip(repr(kind))}")
        check_fields(block, BLOCK_FIELDS[kind], path)
        needed = {"tool_use": ("id", "name"), "tool_result": ("tool_use_id",)}.get(kind, (kind,))
        for name in needed:
            if not isinstance(block.get(name), str):
                raise wrong(f"{path}.{name}", "must be a string")
        if kind == "tool_use" and not isinstance(block.get("input"), dict):
            raise wrong(f"{path}.input", "must be an object")
    return content


def _turn(blocks: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return the messages of a user's turn: results of tools, and texts."""
    found: list[dict[str, Any]] = []
    for place, block in enumerate(blocks):
        if block["type"] == "text":
            found.append({"role": "user", "content": [{"type": "text", "text": block["text"]}]})
            continue
        path = f"{where}[{place}].content"
        given = block.get("content")
        content: Any = "" if given is None else given
        if isinstance(content, list) and content:
            _check_blocks(content, path, ("text",))
        content = text_parts(content, path, ("text",))
        if block.get("is_error"):  # templates have no place for it
            content = (
                f"Error: {content}" if isinstance(content, str) else [{"type": "text", "text": "Error:"}, *content]
            )
        found.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content})
    return found


def _answer(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of an assistant's turn."""
    texts = [{"type": "text", "text": block["text"]} for block in blocks if block["type"] == "text"]
    thought = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)},
        }
        for block in blocks
        if block["type"] == "tool_use"
    ]
    content = texts[0]["text"] if len(texts) == 1 else texts or None
    more = {"reasoning_content": thought or None, "tool_calls": calls or None}
    return {"role": "assistant", "content": content, **{name: one for name, one in more.items() if one}}


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise unsupported(f"{where}.type", f"this server runs no tools of its own, such as {clip(repr(tool['type']))}")
    check_fields(tool, TOOL_FIELDS, where)
    if tool.get("input_schema") is None:
        raise missing_field(f"{where}.input_schema")
    names = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
    return {"type": "function", "function": {to: tool[name] for name, to in names.items() if name in tool}}


def _choice(choice: dict[str, Any] | None) -> tuple[Any, bool | None]:
    """Return a chat's ``tool_choice`` and ``parallel_tool_calls``."""
    if choice is None:
        return None, None
    check_fields(choice, frozenset({"type", "name", "disable_parallel_tool_use"}), "tool_choice")
    single = choice.get("disable_parallel_tool_use")
    if not isinstance(single, bool | None):
        field = "tool_choice.disable_parallel_tool_use"
        raise wrong(field, "must be true or false")
    kind = choice.get("type")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    forms: dict[Any, Any] = {"auto": "auto", "any": "required", "none": "none", "tool": named}
    if not isinstance(kind, str) or kind not in forms:
        raise wrong("tool_choice.type", f"must be one of {', '.join(forms)}")
    if kind == "tool" and not isinstance(choice.get("name"), str):
        raise missing_field("tool_choice.name")
    return forms[kind], None if single is None else not single


def _format(config: dict[str, Any]) -> dict[str, Any] | None:
    check_fields(config, frozenset({"format", "effort"}), "output_config")
    if config.get("effort") not in (None, "high"):
        raise unsupported("output_config.effort", "only 'high', the default, is")
    form = config.get("format")
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise wrong("output_config.format.type", "must be 'json_schema'")
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


def _thinking(request: Request, thinking: dict[str, Any] | None) -> dict[str, Any]:
    """Return the variable of the chat template that turns reasoning on or off."""
    if thinking is None:
        return {}
    check_fields(thinking, frozenset({"type", "budget_tokens", "display"}), "thinking")
    if thinking.get("display") not in (None, "summarized"):
        raise unsupported("thinking.display", "thinking is shown as it is")
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise wrong("thinking.type", "must be 'enabled', 'disabled' or 'adaptive'")
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
        raise wrong("thinking.budget_tokens", "must be a positive whole number")
    service = context_of(request).service
    if kind == "adaptive" or (kind == "disabled" and service.reasoning_tags is None):
        return {}
    if service.reasoning_tags is None:
        raise unsupported("thinking", "this model does not reason (see reasoning_parser)")
    if (switch := thinking_switch(service)) is not None:
        return {switch: kind == "enabled"}
    if kind == "enabled":
        return {}  # it always reasons
    raise unsupported("thinking.type", "the model's chat template has no switch for it")


class _Message(BlockAnswer):
    """The answer of ``POST /v1/messages``."""

    KEEP_ALIVE = sse("ping", {"type": "ping"})

    def __init__(self, one: Conversation, request_id: str):
        super().__init__(one)
        self._request_id = request_id
        self._fields: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": one.model,
            "content": [],
            **dict.fromkeys(("stop_reason", "stop_sequence")),
        }

    def object(self, usage: Usage) -> dict[str, Any]:
        content = [_shown(block, block.text) for block in self.blocks]
        return {**self._fields, "content": content, **self._end, "usage": _usage(usage)}

    @property
    def _end(self) -> dict[str, Any]:
        """Why the answer has ended."""
        if self.reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(self.stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": self.stop}
        called = self.one.parts[0].called
        return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}

    def begin(self, weight_version: int | None) -> bytes:
        started = {**self._fields, "usage": _usage(Usage(len(self.one.prompt), 0))}
        return sse("message_start", {"type": "message_start", "message": started}) + self.KEEP_ALIVE

    def show(self, what: str, block: Block, text: str) -> bytes:
        if what == "start":
            return _event("content_block_start", index=block.index, content_block=_shown(block, ""))
        if what == "stop":
            return _event("content_block_stop", index=block.index)
        name, field = {
            "text": ("text_delta", "text"),
            "reasoning": ("thinking_delta", "thinking"),
            "call": ("input_json_delta", "partial_json"),
        }[block.kind]
        return _event("content_block_delta", index=block.index, delta={"type": name, field: text})

    def end(self, usage: Usage) -> bytes:
        return _event("message_delta", delta=self._end, usage=_usage(usage)) + _event("message_stop")

    def failure(self, refusal: ApiError) -> bytes:
        return sse("error", refusal.anthropic_body(self._request_id))


def _event(kind: str, /, **fields: Any) -> bytes:
    return sse(kind, {"type": kind, **fields})


def _usage(usage: Usage) -> dict[str, Any]:
    cached = usage.cached_tokens or 0
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }


def _shown(block: Block, text: str) -> dict[str, Any]:
    """Return a block of the answer with this text."""
    if block.kind == "text":
        return {"type": "text", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    try:
        value = from_json(text, allow_partial=True)  # of a call that was cut, what is complete
    except ValueError:
        value = {}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": value}
