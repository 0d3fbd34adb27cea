"""A conversation as a chat template is to see it: serving, training and ``LLM`` prepare it here, in one way.

What transformers' ``apply_chat_template`` does first is done first: keys that are null are dropped, and an answer's
reasoning has all its names. Beyond that, arguments of tool calls are checked, a tool's message gets the name of the
function that was called, and Mistral's templates see ids of the form that they accept.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nxd_server.errors import RequestError
from nxd_server.text.tokenizer import check_text

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of an answer's reasoning; templates read the first, gpt-oss's the second."""


def normalise_messages(messages: Any, short_ids: bool = False) -> list[dict[str, Any]]:
    """Return the messages for the template; ``short_ids``: see :func:`shown_id`.

    Raises RequestError that names the field.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages", "must be a list with at least one message")
    result = []
    called: dict[Any, Any] = {}
    """The function of each call, by its id."""
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        if not isinstance(message, Mapping):
            raise RequestError(where, f"must be an object with role and content, got {type(message).__name__}")
        one = {key: value for key, value in message.items() if value is not None}
        role = one.get("role")
        if not isinstance(role, str) or not role:
            raise RequestError(f"{where}.role", f"must be a non-empty string, got {role!r}")
        check_text(role, f"{where}.role")
        reasoning = next((one[name] for name in REASONING if name in one), None)
        if reasoning is not None:
            one = {"thinking": reasoning, **one, "reasoning_content": reasoning}
        if "content" in one or not (one.get("tool_calls") or reasoning):
            _check_content(one.get("content"), f"{where}.content")
        if one.get("tool_calls"):
            one["tool_calls"] = _calls(one["tool_calls"], f"{where}.tool_calls", short_ids)
            called |= {call["id"]: call["function"].get("name") for call in one["tool_calls"] if "id" in call}
        if isinstance(one.get("tool_call_id"), str):
            one["tool_call_id"] = shown_id(one["tool_call_id"], short_ids)
            if role == "tool" and called.get(one["tool_call_id"]):
                one.setdefault("name", called[one["tool_call_id"]])  # some models' templates need it
        result.append(one)
    return result


def _check_content(content: Any, where: str) -> None:
    if isinstance(content, str):
        check_text(content, where)
    elif isinstance(content, Sequence) and content:
        for place, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text":
                raise RequestError(f"{where}[{place}]", f"only parts of type 'text' are supported, got {kind!r}")
            check_text(part.get("text"), f"{where}[{place}].text")
    else:
        raise RequestError(where, "must be a string or a non-empty list of text parts")


def _calls(calls: Any, where: str, short_ids: bool) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(where, "must be a list")
    found = []
    for place, call in enumerate(calls):
        path = f"{where}[{place}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{path}.function", "must be an object with name and arguments")
        if not isinstance(call.get("id"), (str, type(None))):
            raise RequestError(f"{path}.id", "must be a string")
        arguments = _checked_arguments(function.get("arguments"), f"{path}.function.arguments")
        one = {key: value for key, value in call.items() if value is not None}
        one["function"] = {**function, "arguments": arguments}
        if "id" in one:
            one["id"] = shown_id(one["id"], short_ids)
        found.append(one)
    return found


def _checked_arguments(value: Any, where: str) -> Mapping[str, Any] | str:
    """Return a call's arguments, an object or the text of one; none are {}."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    parsed = value
    if isinstance(value, str):
        try:
            parsed = json.loads(value, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            parsed = None
    if not isinstance(parsed, Mapping):
        raise RequestError(where, "must be a JSON object, or its text")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def shown_id(call_id: str, short: bool) -> str:
    """Return a call's id as the template is to see it; ``short``: of nine letters and digits, as Mistral's refuse all
    others, such as those of a conversation that another model began."""
    if not short or re.fullmatch("[a-zA-Z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]
