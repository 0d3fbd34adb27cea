"""The published forms of tool_choice, and strict schemas."""

from __future__ import annotations

import pytest

from nxd_server.http.error_responses import ApiError
from nxd_server.http.openai.tools import chosen, closed

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "clock")]
WEATHER = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("choice", "meant", "count"),
    [
        (None, None, 2), ("auto", "auto", 2), ("none", "none", 2), ("required", "required", 2), ("any", "required", 2),
        *(({"type": kind}, "required" if kind == "any" else kind, 2) for kind in ("auto", "none", "required", "any")),
        (WEATHER, WEATHER, 2), ({"type": "function", "name": "weather"}, WEATHER, 2),
        ({"type": "tool", "name": "weather"}, WEATHER, 2), ({"function": {"name": "weather"}}, WEATHER, 2),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"name": "clock"}]}, "required", 1),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [WEATHER]}}, "auto", 1),
    ],
)  # fmt: skip
def test_every_published_form_is_one_of_chats(choice, meant, count):
    found, tools = chosen(choice, TOOLS)
    assert (found, len(tools)) == (meant, count)


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("some", "tool_choice"), (3, "tool_choice"), ({"type": "function"}, "tool_choice"), ([], "tool_choice"),
        ({"type": "custom", "custom": {"name": "x"}}, "tool_choice.type"), ({"type": []}, "tool_choice.type"),
        ({"type": "allowed_tools", "tools": 3, "mode": "auto"}, "tool_choice.tools"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools.tools"),
        ({"type": "allowed_tools", "tools": [{"name": "x"}], "mode": "auto"}, "tool_choice.tools"),
        ({"type": "allowed_tools", "allowed_tools": {"tools": [WEATHER]}}, "tool_choice.allowed_tools.mode"),
    ],
)  # fmt: skip
def test_other_forms_are_named(choice, param):
    with pytest.raises(ApiError) as caught:
        chosen(choice, TOOLS)
    assert caught.value.param == param


def test_a_strict_schema_is_closed_where_it_says_nothing():
    no = {"additionalProperties": False}
    one, free = {"properties": {"x": {"type": "string"}}}, {"type": "object"}
    given = {
        "type": "object",
        "properties": {"additionalProperties": one, "free": free, "open": {**one, "additionalProperties": True}},
        "items": one, "anyOf": [one, True], "$defs": {"d": one}, "enum": [one],
    }  # fmt: skip
    assert closed(given) == {
        "type": "object",
        "properties": {
            "additionalProperties": {**one, **no}, "free": free, "open": {**one, "additionalProperties": True},
        },
        "items": {**one, **no}, "anyOf": [{**one, **no}, True], "$defs": {"d": {**one, **no}}, "enum": [one], **no,
    }  # fmt: skip
    whole = {**one, "allOf": [one]}
    assert closed(whole) == whole
