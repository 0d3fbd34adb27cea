"""Tool calls in a model's answer while it streams, in the formats that models are trained to write; and the grammars of
answers that must be calls.

``hermes`` (Hermes 2 Pro and 3, Qwen2.5, Qwen3)::

    Let me look. <tool_call>
    {"name": "weather", "arguments": {"city": "Bern"}}
    </tool_call>

``llama3_json`` (Llama 3.1 to 3.3), where the whole answer is a call, or several with ``;`` between them::

    {"name": "weather", "parameters": {"city": "Bern"}}

``mistral``, a list (Mistral 7B v0.3, Nemo, Small up to 3.1) or one after the other (Small 3.2, Devstral, Ministral 3)::

    [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bern"}}]
    [TOOL_CALLS]weather[ARGS]{"city": "Bern"}

What only looks like a call stays text: JSON that is not valid, or a tool that the request does not offer. The time is
linear in the text, whatever the model writes and in whatever pieces: one thread reads the answers of all requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nxd_server.text.detokenize import overlap
from nxd_server.text.structured_outputs import json_rule
from nxd_server.text.tokenizer import Tokenizer

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
TAGS = {"hermes": (OPEN, CLOSE), "mistral": (TOOL_CALLS, CALL_ID, ARGS)}
"""By format. In many tokenizers each is a token of its own."""
MOST_BLANKS = 64
"""Whitespace before a call begins; what goes on is text."""
LONGEST_NAME = 64
"""Characters of a tool's name."""
MOST_FAILURES = 32
"""Texts of one answer that begin like a call of Mistral's and are none: JSON's errors count the lines before them, so
each costs as much as the whole answer; after so many the rest is text. And closing tags within strings of a call: each
is a reason to look at the call from its beginning."""
_VISIBLE = re.compile(r"\S")
_BETWEEN = re.compile(r"[;\s]*")
_BLANKS = re.compile(r"\s*")
_LIST = re.compile(rf"\[\s{{0,{MOST_BLANKS}}}({{|\Z)")
_NAME = re.compile(r"[a-zA-Z0-9_.-]+")
_NAMED = re.compile(r"([a-zA-Z0-9_.-]+)(?:\[CALL_ID\][a-zA-Z0-9]+)?(?:\[ARGS\])?\s*(?={)")
_STRING_OR_CLOSE = re.compile(rf'"(?:[^"\\\n]|\\.)*("?)|{CLOSE}')
_DECODER = json.JSONDecoder()
_HEAD = re.compile(
    r'\{"name": "([a-zA-Z0-9_.-]+)", "(?:arguments|parameters)": '
    r"|\[TOOL_CALLS\]([a-zA-Z0-9_.-]+)(?:\[CALL_ID\][a-zA-Z0-9]+)?\[ARGS\]"
)
"""What a call has before its arguments, as the grammars write it."""
_CERTAIN_HEAD = re.compile(rf"(?:{_HEAD.pattern})(?={{)")
"""The same in an answer that may also be text: arguments that are an object follow."""
_NOTHING = re.compile(r"(?!)")
_LONGEST_HEAD = LONGEST_NAME + 64
_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


@dataclass(frozen=True)
class ToolCall:
    """A call, or a piece of one."""

    name: str
    """Empty in a piece of a call that has begun."""
    arguments: str
    """The text of a JSON object, or what follows of it."""


Read = tuple[str, list[ToolCall]]
"""Text of the answer that belongs to no call, and the calls that are complete."""


class ToolCallReader(Protocol):
    """Reads one answer; ``names`` are those of the tools that the model may call."""

    held: list[str]
    """The pieces of what is held back."""

    def __init__(self, names: Collection[str]): ...

    @property
    def holds(self) -> bool:
        """Whether what is held back begins like a call."""
        ...

    def feed(self, text: str) -> Read:
        """Take the next piece. Text that may turn out to be part of a call is held back."""
        ...

    def end(self) -> Read:
        """Return what was held back."""
        ...


class HermesReader:
    """See :class:`ToolCallReader`. Whitespace after a call is dropped."""

    def __init__(self, names: Collection[str]):
        self._names = frozenset(names)
        self.held: list[str] = []
        """Pieces since what may be a tag, or is one."""
        self._window: str | None = None
        """Within a call: the end of what is held, in which its closing tag may begin."""
        self._after_call = False

    @property
    def holds(self) -> bool:
        return self._window is not None

    def feed(self, text: str) -> Read:
        if self._window is not None and CLOSE not in self._window + text:
            self.held.append(text)
            self._window = _tail(self._window + text)
            return "", []
        return self._read("".join((*self.held, text)), ended=False)

    def end(self) -> Read:
        return self._read("".join(self.held), ended=True)

    def _read(self, data: str, ended: bool) -> Read:
        said: list[str] = []
        calls: list[ToolCall] = []
        self.held, self._window, place = [], None, 0
        while (start := data.find(OPEN, place)) >= 0:
            self._say(data[place:start], said)
            inside = start + len(OPEN)
            first = _VISIBLE.search(data, inside, inside + MOST_BLANKS + 1)
            blank = first is None and len(data) - inside <= MOST_BLANKS
            if not blank and (first is None or first[0] != "{"):
                self._say(OPEN, said)  # only a mention
                place = inside
                continue
            end = _end_of_call(data, inside, ended)
            if end < 0 and not ended:
                self.held, self._window = [data[start:]], None if blank else _tail(data)
                return "".join(said), calls
            self._candidate(data[inside:] if end < 0 else data[inside:end], CLOSE if end >= 0 else "", said, calls)
            place = len(data) if end < 0 else end + len(CLOSE)
        keep = 0 if ended else overlap(data, OPEN, len(data) - place)
        self._say(data[place : len(data) - keep], said)
        self.held = [data[len(data) - keep :]] if keep else []
        return "".join(said), calls

    def _candidate(self, inside: str, close: str, said: list[str], calls: list[ToolCall]) -> None:
        """Take the text between two tags, or up to the end; a model may forget to close a call before the next."""
        if OPEN in inside and len(_calls(inside, self._names)) != 1:
            *before, last = inside.split(OPEN)
            for piece in before:
                self._candidate(piece, "", said, calls)
            return self._candidate(last, close, said, calls)
        found = _calls(inside, self._names)
        if len(found) != 1:
            return self._say(OPEN + inside + close, said)
        calls += found
        self._after_call = True

    def _say(self, text: str, said: list[str]) -> None:
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        said.append(text)


class Llama3JsonReader:
    """See :class:`ToolCallReader`. An answer that begins with a brace is held back to its end."""

    def __init__(self, names: Collection[str]):
        self._names = frozenset(names)
        self.held: list[str] = []
        self._blanks = 0
        self._is_text: bool | None = None

    @property
    def holds(self) -> bool:
        return self._is_text is False

    def feed(self, text: str) -> Read:
        if self._is_text is None:
            self._begin(text)
        self.held.append(text)
        return self._release() if self._is_text else ("", [])

    def _begin(self, text: str) -> None:
        first = _VISIBLE.search(text)
        self._blanks += len(text) if first is None else first.start()
        if self._blanks > MOST_BLANKS:
            self._is_text = True
        elif first is not None:
            self._is_text = first[0] != "{"

    def end(self) -> Read:
        calls = _calls("".join(self.held), self._names) if self._is_text is False else []
        return ("", calls) if calls else self._release()

    def _release(self) -> Read:
        text, self.held = "".join(self.held), []
        return text, []


class MistralReader:
    """See :class:`ToolCallReader`. What begins like a call is held back to the answer's end. Whitespace after a call is
    dropped."""

    def __init__(self, names: Collection[str]):
        self._names = frozenset(names)
        self.held: list[str] = []
        self.holds = False

    def feed(self, text: str) -> Read:
        if self.holds:
            self.held.append(text)
            return "", []
        data, place = "".join((*self.held, text)), 0
        while (start := data.find(TOOL_CALLS, place)) >= 0:
            place = start + len(TOOL_CALLS)
            begun = self._begins(data[place : place + 2 * MOST_BLANKS + LONGEST_NAME])
            if begun is not False:
                self.held, self.holds = [data[start:]], begun is True
                return data[:start], []
        keep = overlap(data, TOOL_CALLS, len(data) - place)
        self.held = [data[len(data) - keep :]] if keep else []
        return data[: len(data) - keep], []

    def _begins(self, text: str) -> bool | None:
        """Whether ``text``, after the tag, is the beginning of a call; None if that is still open."""
        begun = text.lstrip()
        if len(text) - len(begun) > MOST_BLANKS:
            return False
        if (found := _LIST.match(begun)) is not None:
            return bool(found[1]) or None
        name = _NAME.match(begun)
        if name is not None and name.end() < len(begun):
            return name[0] in self._names
        return None if any(one.startswith(begun) for one in self._names) else False

    def end(self) -> Read:
        data = "".join(self.held)
        self.held, self.holds = [], False
        said: list[str] = []
        calls: list[ToolCall] = []
        place = failures = 0
        while failures < MOST_FAILURES and (start := data.find(TOOL_CALLS, place)) >= 0:
            said.append(data[place:start])
            found, place = self._calls(data, start + len(TOOL_CALLS))
            calls += found
            if found:
                place = _after(_BLANKS, data, place)
            else:
                failures += 1
                said.append(TOOL_CALLS)
        return "".join((*said, data[place:])), calls

    def _calls(self, data: str, place: int) -> tuple[list[ToolCall], int]:
        """Return the calls after a tag, at ``place``, and where they end; none, and ``place``, if that is text."""
        begin = _after(_BLANKS, data, place)
        named = _NAMED.match(data, begin)
        try:
            value, end = _DECODER.raw_decode(data, named.end() if named else begin)
            values = [{"name": named[1], "arguments": value}] if named else value
            found = [_call(value, self._names) for value in values] if isinstance(values, list) else []
        except (ValueError, RecursionError):
            return [], place
        calls = [call for call in found if call is not None]
        return (calls, end) if calls and len(calls) == len(found) else ([], place)


FORMATS: dict[str, type[ToolCallReader]] = {
    "hermes": HermesReader,
    "llama3_json": Llama3JsonReader,
    "mistral": MistralReader,
}
SINGLE = frozenset({"llama3_json"})
"""Formats whose models' own templates refuse messages of several calls."""


def takes_tools(templates: Iterable[str]) -> bool:
    """Whether one of a model's chat templates shows it the tools of a request."""
    return any("tools" in text for text in templates)


def format_of(templates: Iterable[str]) -> str | None:
    """Return the format that a model's chat templates ask it to write; None if it is none of :data:`FORMATS`."""
    text = "\n".join(templates)
    if not takes_tools([text]) or "<function=" in text:  # XML inside of tags
        return None
    if OPEN in text:
        return "hermes" if '"arguments"' in text else None
    if TOOL_CALLS in text:
        return "mistral"
    return "llama3_json" if '"parameters":' in text else None


def _calls(text: str, names: Collection[str]) -> list[ToolCall]:
    """Return the calls that ``text`` consists of; none if a part of it is anything else."""
    calls: list[ToolCall] = []
    place = _after(_BETWEEN, text, 0)
    while place < len(text):
        try:
            value, end = _DECODER.raw_decode(text, place)
            call = _call(value, names)
        except (ValueError, RecursionError):  # also of numbers and characters that no other reader would take
            return []
        if call is None:
            return []
        calls.append(call)
        place = _after(_BETWEEN, text, end)
    return calls


def _end_of_call(data: str, begin: int, ended: bool) -> int:
    """Return where the tag is that closes a call: none within a string of its JSON. -1 if it is yet to come."""
    inside = 0
    for found in _STRING_OR_CLOSE.finditer(data, begin):
        if found[0] == CLOSE:
            return found.start()
        inside += found[0].count(CLOSE)
        is_open = not found[1] and data[found.end() :] in ("", "\\")
        if inside > MOST_FAILURES or (not found[1] and (ended or not is_open)):
            return data.find(CLOSE, begin)  # not JSON, or slow to read
        if is_open:
            return -1
    return -1


def _tail(text: str) -> str:
    """Return the end of ``text`` in which a closing tag may begin."""
    return text[-(len(CLOSE) - 1) :]


def _after(pattern: re.Pattern[str], text: str, place: int) -> int:
    found = pattern.match(text, place)
    return found.end() if found else place


def _call(value: Any, names: Collection[str]) -> ToolCall | None:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in names:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # the text of an object, as some models write it
        arguments = json.loads(arguments) if arguments.strip() else None
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        return None
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()
    return ToolCall(name, text)


# --- answers that must be calls ---


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


class ForcedCallReader:
    """Reads the calls of an answer that must be calls, piece by piece, as the model writes them.

    The grammar of such an answer (:func:`call_rules`) leaves no doubt what a call is, so nothing is held back until it
    is complete, as in answers that may also be text, and a call that is cut is returned as far as it goes. Arguments
    are the text that the model has written.
    """

    def __init__(self, head: re.Pattern[str] = _HEAD) -> None:
        self._head = head
        self._held = ""
        """Between calls: the end of what was written, in which a call may begin."""
        self._depth = 0
        """Of the brackets that are open in the arguments."""
        self._in_string = self._escaped = False
        self.inside = False
        """Whether the arguments of a call are not complete."""
        self.wrote = False
        """Whether the answer has a visible character."""

    def feed(self, text: str) -> list[ToolCall]:
        """Take the next piece; return what it adds to the calls, one for each."""
        self.wrote = self.wrote or bool(text.strip())
        found: list[ToolCall] = []
        name, place = "", 0
        while place < len(text):
            if self.inside:
                end = self._end_of_arguments(text, place)
                found.append(ToolCall(name, text[place:end]))
                name, place = "", end
                continue
            held = self._held + text[place:]
            head = self._head.search(held)
            if head is None:
                self._held = held[-_LONGEST_HEAD:]
                break
            name, self.inside, self._held = head[1] or head[2], True, ""
            place = len(text) - (len(held) - head.end())
        if name:
            found.append(ToolCall(name, ""))
        return found

    def _end_of_arguments(self, text: str, place: int) -> int:
        """Return where the arguments end in ``text``: behind their last brace, or with the text."""
        while place < len(text):
            if self._escaped:
                self._escaped, place = False, place + 1
                continue
            mark = (_IN_STRING if self._in_string else _STRUCTURE).search(text, place)
            if mark is None:
                break
            place = mark.end()
            if mark[0] == "\\":
                self._escaped = True
            elif mark[0] == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if mark[0] in "{[" else -1
                if self._depth == 0:
                    self.inside = False
                    return place
        return len(text)


class StreamingReader:
    """Reads the calls of an answer that may also be text, and returns the arguments of a call as they are written.

    ``reader`` decides what a call is, once it is complete. Before that a call is shown as soon as it has the name of a
    tool and an object for its arguments begins. Should it not become one in the end, it stays as far as it went, and
    its text is text of the answer, unless that ends within the arguments.
    """

    def __init__(self, reader: ToolCallReader, names: Collection[str]):
        self._reader, self._names = reader, frozenset(names)
        self._writing: ForcedCallReader | None = None
        """Reads what the reader holds back."""
        self._shown: list[tuple[str, list[str]]] = []
        """Calls that were returned and that the reader has not confirmed: name, and pieces of the arguments."""
        self.cut = False
        """Whether a call was returned that is none, or not complete."""

    def feed(self, text: str) -> Read:
        """Take the next piece."""
        said, calls = self._reader.feed(text)
        if self._writing is None and self._reader.holds:
            self._writing, text = ForcedCallReader(_CERTAIN_HEAD), "".join(self._reader.held)
        pieces = self._written(text)
        pieces += self._others(calls)
        if not self._reader.holds:
            self._writing = None
            self.cut, self._shown = self.cut or bool(self._shown), []
        return said, pieces

    def end(self) -> Read:
        """Return what was held back."""
        said, calls = self._reader.end()
        pieces = self._others(calls)
        self.cut = self.cut or bool(self._shown)
        within = self._shown and self._writing is not None and self._writing.inside
        return "" if within else said, pieces

    def _written(self, text: str) -> list[ToolCall]:
        """Return what the next piece adds to calls that are not complete."""
        found: list[ToolCall] = []
        for piece in self._writing.feed(text) if self._writing is not None else ():
            if piece.name and piece.name not in self._names:
                self._writing = ForcedCallReader(_NOTHING)
                break
            if piece.name:
                self._shown.append((piece.name, []))
            self._shown[-1][1].append(piece.arguments)
            found.append(piece)
        return found

    def _others(self, calls: Sequence[ToolCall]) -> list[ToolCall]:
        """Return those of the complete calls that were not returned piece by piece."""
        found = []
        for call in calls:
            for place, (name, pieces) in enumerate(self._shown):
                if name == call.name and _same("".join(pieces), call.arguments):
                    self.cut = self.cut or place > 0
                    del self._shown[: place + 1]
                    break
            else:
                found.append(call)
        return found


def _same(written: str, arguments: str) -> bool:
    try:
        return json.loads(written) == json.loads(arguments)
    except (ValueError, RecursionError):
        return False
