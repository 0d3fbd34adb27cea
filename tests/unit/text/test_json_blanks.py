"""Whitespace between the tokens of JSON: what people indent with, and no more, or none."""

import json

import pytest

from nxd_server.errors import RequestError
from nxd_server.text.structured_outputs import StructuredOutputs
from nxd_server.text.tool_calls import call_rules
from tests.support.text.text_tokenizers import byte_level, compiled, taken

VALUE = {"a": 1, "b": [1, {"c": None}]}
SCHEMA = {"type": "object", "required": ["a", "b"]}
USUAL = [
    json.dumps(VALUE),
    json.dumps(VALUE, separators=(",", ":")),
    json.dumps(VALUE, indent=2),
    json.dumps(VALUE, indent=4),
    json.dumps(VALUE, indent="\t"),
    json.dumps(VALUE, indent=2).replace("\n", "\r\n"),
    '{ "a" : 1 , "b" : [ 1 , { } ] }',
]
ENDLESS = ["  ", "\n\n", " \n", "\t", "\n" + " " * 17, "\n" + "\t" * 5]


@pytest.mark.parametrize("asked", [{"json": SCHEMA}, {"json_object": True}], ids=str)
def test_json_is_indented_as_usual_and_has_no_other_blanks(asked):
    grammar = compiled(byte_level(), **asked)
    for text in USUAL:
        assert taken(byte_level(), grammar, text) == "all", text
    for blanks in ENDLESS:
        for mark in ("{", ":", ",", "["):
            before, _, behind = json.dumps(VALUE, separators=(",", ":")).partition(mark)
            found = taken(byte_level(), grammar, before + mark + blanks + behind)
            assert found != "all" and len(found) < len(before + mark + blanks), (mark, blanks)


def test_without_any_whitespace_there_is_none():
    compact = json.dumps(VALUE, separators=(",", ":"))
    rules = call_rules("llama3_json", [("f", SCHEMA)], False, byte_level(), byte_level().vocab_size, compact=True)
    call = '{{"name": "f", "parameters": {}}}'.format
    forced = compiled(byte_level(), grammar="\n".join(["start: calls", *rules]), made=True)
    for asked in ({"json": SCHEMA}, {"json_object": True}):
        grammar = compiled(byte_level(), **asked, disable_any_whitespace=True)
        for text in USUAL:
            assert (taken(byte_level(), grammar, text) == "all") == (text == compact)
            assert (taken(byte_level(), forced, call(text)) == "all") == (text == compact)


def test_the_option_is_a_switch_and_no_form():
    for wrong in ("yes", 1, None):
        with pytest.raises(RequestError, match=r"disable_any_whitespace.*is a switch, true or false"):
            StructuredOutputs.of({"json": SCHEMA, "disable_any_whitespace": wrong})
    with pytest.raises(RequestError, match="exactly one of json, json_object, regex, choice, grammar; got none"):
        StructuredOutputs.of({"disable_any_whitespace": True})
