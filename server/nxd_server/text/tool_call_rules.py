"""Grammars of tool calls, for answers that must call a tool: the calls as the model was trained to write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nxd_server.text.structured_outputs import json_rule
from nxd_server.text.tokenizer import Tokenizer
from nxd_server.text.tool_calls import ARGS, CALL_ID, CLOSE, OPEN, TOOL_CALLS


def call_rules(
    tool_format: str,
    tools: Sequence[tuple[str, Mapping[str, Any]]],
    several: bool,
    tokenizer: Tokenizer,
    vocab_size: int,
    compact: bool = False,
) -> list[str]:
    """Return the rules of a grammar, in Lark's notation, whose rule ``calls`` is a call of one of ``tools`` in
    ``tool_format``, or ``several``.

    ``tools``: the names, and the JSON schemas of the arguments. A tag that is one of the model's ``vocab_size`` tokens
    is that token. ``compact``: arguments have no blanks.
    """

    def tag(text: str) -> str:
        token = tokenizer.token_to_id(text)
        return json.dumps(text) if token is None or token >= vocab_size else f"<[{token}]>"

    first, between, last = "", "", ""
    if tool_format == "hermes":
        between = "LINE"
    elif tool_format == "llama3_json":
        between = '"; "'
    elif tokenizer.token_to_id(ARGS) is None:  # Mistral's older models, whose calls are a list
        tool_format = "mistral_list"
        first, between, last = f'{tag(TOOL_CALLS)} BLANK "["', '", "', '"]"'
    more = f"({between} call)*" if several else ""
    rules = [f"calls: {first} call {more} {last}", r"LINE: /\n?/", "BLANK: / ?/", "ID: /[a-zA-Z0-9]{9}/"]
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
    for number, (name, schema) in enumerate(tools):
        arguments = f"arguments_{number}"
        if tool_format == "hermes":
            call = f"{tag(OPEN)} LINE {_object(name, 'arguments', arguments)} LINE {tag(CLOSE)}"
        elif tool_format == "llama3_json":
            call = _object(name, "parameters", arguments)
        elif tool_format == "mistral_list":
            call = _object(name, "arguments", arguments, '(", \\"id\\": \\"" ID "\\"")?')
        else:
            call = f"{tag(TOOL_CALLS)} {json.dumps(name)} ({tag(CALL_ID)} ID)? {tag(ARGS)} {arguments}"
        rules += [f"call_{number}: {call}", f"{arguments}: {json_rule({'type': 'object', **schema}, compact)}"]
    return rules


def _object(name: str, key: str, arguments: str, more: str = "") -> str:
    """Return a rule's right side: a call as one object, with the rule ``arguments`` for the value of ``key``."""
    begin = f'{{"name": {json.dumps(name)}, "{key}": '
    return f'{json.dumps(begin)} {arguments} {more} "}}"'
