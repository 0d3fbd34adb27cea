"""What the answer to a request must be: its ``response_format``, its ``structured_outputs``, and calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nxd_server.http.error_responses import bad_request, clip, missing_field, unsupported
from nxd_server.http.openai.schemas import ChatBody, SamplingBody
from nxd_server.http.openai.tools import makes_several, must_call
from nxd_server.text.structured_outputs import COMPACT, StructuredOutputs
from nxd_server.text.tokenizer import Tokenizer
from nxd_server.text.tool_calls import call_rules

NEUTRAL = ("json_object", "disable_additional_properties", "disable_fallback")
"""Fields of vLLM's that say nothing if they are false."""
SCHEMA_FIELDS = ("name", "description", "schema", "strict")


def wanted_form(body: SamplingBody) -> StructuredOutputs | None:
    """Return what the text of the answer must be; None for any text. Raises ApiError: 400 naming the field."""
    wanted = _of_response_format(body.response_format)
    compact = is_compact(body)
    given = {
        name: value
        for name, value in (body.structured_outputs or {}).items()
        if value is not None and name != COMPACT and not (value is False and name in NEUTRAL)
    }
    if not given:
        return wanted and replace(wanted, disable_any_whitespace=compact)
    if wanted is not None:
        raise bad_request("send `response_format` or `structured_outputs`, not both", "response_format")
    return StructuredOutputs.of({**given, COMPACT: compact})


def is_compact(body: SamplingBody) -> bool:
    """Return whether JSON is to have no whitespace, that of ``response_format`` and of calls included."""
    asked = (body.structured_outputs or {}).get(COMPACT)
    if not isinstance(asked, bool | None):
        raise bad_request(f"`structured_outputs.{COMPACT}` must be true or false", f"structured_outputs.{COMPACT}")
    return bool(asked)


def _of_response_format(value: dict[str, Any] | None) -> StructuredOutputs | None:
    if value is None:
        return None
    kind = value.get("type")
    known = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    if kind not in ("text", "json_object", "json_schema"):
        raise bad_request(
            f"`response_format.type` must be 'text', 'json_object' or 'json_schema', got {clip(repr(kind))}",
            "response_format.type",
        )
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
    return StructuredOutputs(json=described["schema"], where=f"{where}.schema")


def with_calls(
    body: ChatBody,
    wanted: StructuredOutputs | None,
    tools: Sequence[dict[str, Any]],
    tool_format: str | None,
    tokenizer: Tokenizer,
    vocab_size: int,
) -> StructuredOutputs | None:
    """Return what the answer must be if it may, or must, call one of ``tools``; ``wanted``: what its text must be.

    Raises ApiError: 400 for a constraint on texts that cannot be combined with calls.
    """
    choice = body.tool_choice
    forced = must_call(body)
    if not tools or tool_format is None or (wanted is None and not forced):
        return wanted
    if wanted is not None and wanted.form not in ("json", "json_object"):
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
    if not forced and wanted is not None:
        start, rules = "start: calls | answer", [*rules, f"answer: {wanted.rule}"]
    return StructuredOutputs(grammar="\n".join([start, *rules]), where="tools", made=True)


def schemas_of(tools: Sequence[dict[str, Any]]) -> list[StructuredOutputs]:
    """Return the constraint on each tool's arguments alone, whose error names the tool."""
    return [
        StructuredOutputs(json=tool["function"]["parameters"], where=f"tools[{place}].function.parameters")
        for place, tool in enumerate(tools)
    ]
