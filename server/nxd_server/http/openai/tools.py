"""Tools in chat requests: the offered ones, and calls in answers."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nxd_server.http.error_responses import ApiError, bad_request, check_fields, clip, missing_field, unsupported, wrong
from nxd_server.http.openai.schemas import ChatBody, SamplingBody
from nxd_server.text.conversation import shown_id
from nxd_server.text.structured_outputs import COMPACT, StructuredOutputs
from nxd_server.text.tokenizer import Tokenizer
from nxd_server.text.tool_calls import (
    FORMATS,
    LONGEST_NAME,
    SINGLE,
    ForcedCallReader,
    StreamingReader,
    ToolCall,
    call_rules,
)

NEUTRAL = ("json_object", "disable_additional_properties", "disable_fallback")
"""Fields of vLLM's that say nothing if they are false."""
SCHEMA_FIELDS = ("name", "description", "schema", "strict")
MOST_TOOLS = 128
TOOL_FIELDS = frozenset({"name", "description", "parameters", "strict"})
NEEDED: dict[str, Any] = {"description": "", "parameters": {"type": "object", "properties": {}}}
_NAME = re.compile(rf"[a-zA-Z0-9_.-]{{1,{LONGEST_NAME}}}")


def offered_tools(tools: list[dict[str, Any]], choice: Any, tool_format: str | None) -> list[dict[str, Any]]:
    """Return the tools that the model is to see, without the fields that say nothing to it.

    ``choice``: ``tool_choice``; ``tool_format``: of the model's calls, one of
    :data:`~nxd_server.text.tool_calls.FORMATS`. Raises ApiError: 400 for a tool that is not a function, a choice of
    none of them, and a model without tools.
    """
    if len(tools) > MOST_TOOLS:
        raise wrong("tools", f"holds {len(tools)} tools; at most {MOST_TOOLS} are taken")
    checked = [_checked(tool, f"tools[{place}]") for place, tool in enumerate(tools)]
    if len({tool["function"]["name"] for tool in checked}) < len(checked):
        raise bad_request("two of `tools` have one name", "tools")
    if isinstance(choice, dict) and _name_in(choice) not in {tool["function"]["name"] for tool in checked}:
        raise wrong("tool_choice", f"names {clip(_name_in(choice))!r}, which `tools` lacks")
    if choice == "required" and not checked:
        raise wrong("tool_choice", "is 'required', and `tools` offers none")
    if choice == "none" or not checked:
        return []
    if tool_format is None:
        raise no_tools("tools")
    return checked


def chosen(choice: Any, tools: list[dict[str, Any]]) -> tuple[Any, list[dict[str, Any]]]:
    """Return ``tool_choice``, in any form in which OpenAI's routes, Anthropic's and Mistral's have it, as one of chats:
    None, 'none', 'auto', 'required' or a function; and the tools that may be called.

    Raises ApiError: 400 for another form, and for a tool that is not among ``tools``.
    """
    kind = choice.get("type", "function") if isinstance(choice, dict) else choice
    if kind in (None, "none", "auto", "required", "any"):
        return "required" if kind == "any" else kind, tools
    if kind in ("function", "tool") and (name := _name_in(choice)):
        return {"type": "function", "function": {"name": name}}, tools
    if kind == "allowed_tools" and isinstance(choice, dict):
        where = "tool_choice" if "tools" in choice else "tool_choice.allowed_tools"
        given = choice if "tools" in choice else choice.get("allowed_tools")
        allowed = given.get("tools") if isinstance(given, dict) else None
        if not isinstance(given, dict) or not isinstance(allowed, list):
            raise wrong(f"{where}.tools", "must be a list of tools")
        names, offered = [_name_in(one) for one in allowed], [_name_in(tool) for tool in tools]
        if unknown := [name for name in names if not name or name not in offered]:
            raise wrong(f"{where}.tools", f"names {clip(repr(unknown[0]))}, which `tools` lacks")
        if given.get("mode") not in ("auto", "required"):
            raise wrong(f"{where}.mode", "must be 'auto' or 'required'")
        return given["mode"], [tool for tool, name in zip(tools, offered, strict=True) if name in names]
    if isinstance(choice, dict) and kind not in ("function", "tool"):
        raise unsupported("tool_choice.type", f"only functions are called here, not {clip(repr(kind))}")
    form = '{"type": "function", "function": {"name": ...}}'
    raise wrong("tool_choice", f"must be 'auto', 'none', 'required' or {form}")


def _name_in(value: Any) -> str:
    """Return the name of a function, with or without an object around it; "" if there is none."""
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def must_call(body: ChatBody) -> bool:
    """Whether the answer is to be nothing but calls."""
    return body.tool_choice == "required" or isinstance(body.tool_choice, dict)


def makes_several(body: ChatBody, tool_format: str | None) -> bool:
    """Whether an answer may hold several calls."""
    return tool_format not in SINGLE if body.parallel_tool_calls is None else body.parallel_tool_calls


def no_tools(param: str) -> ApiError:
    return unsupported(
        param,
        f"this model's chat template takes no tools, or asks for calls in none of the formats {', '.join(FORMATS)}; "
        "the setting tool_call_parser names the format of such a model",
    )


def _checked(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise unsupported(f"{where}.type", "only tools of the type 'function' are called")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise missing_field(f"{where}.function")
    check_fields(function, TOOL_FIELDS, f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        problem = f"must have 1 to {LONGEST_NAME} letters, digits, '_', '-' or '.'"
        raise wrong(f"{where}.function.name", problem)
    for field, kind, what in (("description", str, "a string"), ("parameters", dict, "an object")):
        if not isinstance(function.get(field), (kind, type(None))):
            raise wrong(f"{where}.function.{field}", f"must be {what}")
    if (function.get("parameters") or {}).get("type", "object") != "object":
        raise wrong(f"{where}.function.parameters.type", "must be 'object'")
    kept = {key: value for key, value in function.items() if value is not None and key != "strict"}
    if function.get("strict") is True and "parameters" in kept:
        kept["parameters"] = closed(kept["parameters"])
    # In the client's order, which templates show. Both may be left out, and some models' templates need them.
    return {"type": "function", "function": {**kept, **{k: v for k, v in NEEDED.items() if k not in kept}}}


class ChoiceCalls:
    """Takes the calls out of the text of one choice, and numbers them."""

    def __init__(
        self,
        tool_format: str | None,
        names: Sequence[str],
        parallel: bool,
        named: str = "",
        forced: bool = False,
        stream: bool = False,
    ):
        """``names``: of the tools that the request offers; without any, or without ``tool_format``, all is text.
        ``parallel``: more than one call is returned. ``named``: the tool that the request names; its call is the
        answer's regular end, as in OpenAI's API. ``forced``: the answer is nothing but calls, which are returned as
        they are written, and one that is cut as far as it goes. ``stream``: so are those of an answer that may also be
        text."""
        self._format = tool_format
        reader = FORMATS[tool_format](names) if names and tool_format and not forced else None
        self._reader = StreamingReader(reader, names) if reader and stream else reader
        self._forced = ForcedCallReader() if forced else None
        self._parallel = parallel
        self._named = named
        self._count = 0
        self._cut = self._hidden = False
        """Whether a call is not complete; whether the last call is one too many."""

    @property
    def optional(self) -> bool:
        """Whether the text may hold calls."""
        return self._reader is not None

    @property
    def forced(self) -> bool:
        return self._forced is not None

    @property
    def called(self) -> bool:
        """Whether there are calls, all of them complete."""
        return self._count > 0 and not self._cut

    def take(self, text: str, ended: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """Return the answer's next text, and what it adds to its calls as ``tool_calls`` of a chunk."""
        if self._forced is not None:
            pieces = self._forced.feed(text)
            if ended:
                self._cut = self._forced.inside
                if self._named and not self._count and not pieces and self._forced.wrote:
                    pieces, self._cut = [ToolCall(self._named, "")], True
            return "", [self._delta(piece.name, piece.arguments) for piece in pieces]
        if self._reader is None:
            return text, []
        said, calls = self._reader.feed(text)
        if ended:
            more, others = self._reader.end()
            said, calls = said + more, calls + others
            self._cut = isinstance(self._reader, StreamingReader) and self._reader.cut
        shown = []
        for call in calls:
            if call.name:
                self._hidden = not self._parallel and self._count > 0
            if not self._hidden:
                shown.append(self._delta(call.name, call.arguments))
        return said, shown

    def _delta(self, name: str, arguments: str) -> dict[str, Any]:
        """Return the piece of a call; ``name`` is "" if it is not the first one."""
        if not name:
            return {"index": self._count - 1, "function": {"arguments": arguments}}
        self._count += 1
        return {
            "index": self._count - 1,
            "id": shown_id(f"call_{uuid.uuid4().hex[:24]}", self._format == "mistral"),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def reason(self, reason: str) -> str:
        """Return the choice's finish reason, from the engine's."""
        return "tool_calls" if self.called and reason == "stop" and not self._named else reason


def choice_calls(body: ChatBody, tools: Sequence[dict[str, Any]], tool_format: str | None) -> list[ChoiceCalls]:
    """Return one for every choice of the request."""
    names = [tool["function"]["name"] for tool in tools]
    parallel, named = makes_several(body, tool_format), _name_in(body.tool_choice)
    return [ChoiceCalls(tool_format, names, parallel, named, must_call(body), body.stream) for _ in range(body.n)]


# --- the constraint on the answer ---


def requested_form(body: SamplingBody) -> StructuredOutputs | None:
    """Return what the text of the answer must be; None for any text. Raises ApiError: 400 naming the field."""
    requested = _of_response_format(body.response_format)
    compact = is_compact(body)
    given = {
        name: value
        for name, value in (body.structured_outputs or {}).items()
        if value is not None and name != COMPACT and not (value is False and name in NEUTRAL)
    }
    older = body.guided
    if not given and not older:
        return requested and replace(requested, disable_any_whitespace=compact)
    if requested is not None or (given and older):
        name = "response_format" if requested is not None else f"guided_{next(iter(older))}"
        raise bad_request("send one of `response_format`, `structured_outputs` and `guided_...`", name)
    if older:
        return StructuredOutputs(**older, where=f"guided_{next(iter(older))}", disable_any_whitespace=compact)
    return StructuredOutputs.of({**given, COMPACT: compact})


def is_compact(body: SamplingBody) -> bool:
    """Return whether JSON is to have no whitespace, that of ``response_format`` and of calls included."""
    asked = (body.structured_outputs or {}).get(COMPACT)
    if not isinstance(asked, bool | None):
        raise wrong(f"structured_outputs.{COMPACT}", "must be true or false")
    return bool(asked)


def _of_response_format(value: dict[str, Any] | None) -> StructuredOutputs | None:
    if value is None:
        return None
    kind = value.get("type")
    known = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    if kind not in ("text", "json_object", "json_schema"):
        problem = f"must be 'text', 'json_object' or 'json_schema', got {clip(repr(kind))}"
        raise wrong("response_format.type", problem)
    for name, given in value.items():
        if name not in known and given is not None:
            raise unsupported(f"response_format.{clip(name)}", f"a format of the type {kind!r} has no such field")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True, where="response_format")
    where, described = "response_format.json_schema", value.get("json_schema")
    if not isinstance(described, dict):
        raise missing_field(where)
    for name in described:
        if name not in SCHEMA_FIELDS:
            raise unsupported(f"{where}.{clip(name)}", f"its fields are {', '.join(SCHEMA_FIELDS)}")
    if not isinstance(described.get("schema"), dict):
        raise missing_field(f"{where}.schema")
    schema = closed(described["schema"]) if described.get("strict") is True else described["schema"]
    return StructuredOutputs(json=schema, where=f"{where}.schema")


def closed(schema: Any) -> Any:
    """Return a strict schema with every object that names its properties, and says nothing of others, without others;
    parts of ``allOf`` excepted, each of which describes the whole."""
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for name in ("properties", "$defs", "definitions"):
        if isinstance(found.get(name), dict):
            found[name] = {key: closed(one) for key, one in found[name].items()}
    for name in ("anyOf", "oneOf", "prefixItems"):
        if isinstance(found.get(name), list):
            found[name] = [closed(one) for one in found[name]]
    if "items" in found:
        found["items"] = closed(found["items"])
    if isinstance(found.get("properties"), dict) and "allOf" not in found:
        found.setdefault("additionalProperties", False)
    return found


def with_calls(
    body: ChatBody,
    requested: StructuredOutputs | None,
    tools: Sequence[dict[str, Any]],
    tool_format: str | None,
    tokenizer: Tokenizer,
    vocab_size: int,
) -> StructuredOutputs | None:
    """Return what the answer must be if it may, or must, call one of ``tools``; ``requested``: what its text must be.

    Raises ApiError: 400 for a constraint on texts that cannot be combined with calls.
    """
    choice = body.tool_choice
    forced = must_call(body)
    if not tools or tool_format is None or (requested is None and not forced):
        return requested
    if requested is not None and requested.form not in ("json", "json_object"):
        raise bad_request(
            "with `tools`, `structured_outputs` must be json or json_object; or send tool_choice 'none'",
            "structured_outputs",
        )
    named = choice["function"]["name"] if isinstance(choice, dict) else None
    names = [tool["function"]["name"] for tool in tools]
    arguments = [
        (name, one.schema) for name, one in zip(names, schemas_of(tools), strict=True) if named in (None, name)
    ]
    several = named is None and makes_several(body, tool_format)
    rules = call_rules(tool_format, arguments, several, tokenizer, vocab_size, is_compact(body))
    start = "start: calls"
    if not forced and requested is not None:
        start, rules = "start: calls | answer", [*rules, f"answer: {requested.rule}"]
    return StructuredOutputs(grammar="\n".join([start, *rules]), where="tools", made=True)


def schemas_of(tools: Sequence[dict[str, Any]]) -> list[StructuredOutputs]:
    """Return the constraint on each tool's arguments alone, whose error names the tool."""
    return [
        StructuredOutputs(json=tool["function"]["parameters"], where=f"tools[{place}].function.parameters")
        for place, tool in enumerate(tools)
    ]
