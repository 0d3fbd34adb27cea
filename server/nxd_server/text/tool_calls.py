"""Find tool calls in a model's answer while it streams, in the formats that models are trained to write.

``hermes`` (Hermes 2 Pro, Qwen2.5, Qwen3)::

    Let me look. <tool_call>
    {"name": "weather", "arguments": {"city": "Bern"}}
    </tool_call>

``llama3_json`` (Llama 3.1 to 3.3), where the whole answer is a call, or several with ``;`` between them::

    {"name": "weather", "parameters": {"city": "Bern"}}

What only looks like a call stays text: JSON that is not valid, or a tool that the request does not offer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str
    """The text of a JSON object."""


Read = tuple[str, list[ToolCall]]
"""Text of the answer that belongs to no call, and the calls that are complete."""


class ToolCallReader(Protocol):
    """Reads one answer; ``names`` are those of the tools that the model may call."""

    def __init__(self, names: Collection[str]): ...

    def feed(self, text: str) -> Read:
        """Take the next piece. Text that may turn out to be part of a call is held back."""
        ...

    def end(self) -> Read:
        """Return what was held back."""
        ...


class HermesReader:
    """See :class:`ToolCallReader`. Whitespace after a call is dropped."""

    def __init__(self, names: Collection[str]):
        self._names = names
        self._held = ""
        self._after_call = False

    def feed(self, text: str) -> Read:
        self._held += text
        return self._read(ended=False)

    def end(self) -> Read:
        return self._read(ended=True)

    def _read(self, ended: bool) -> Read:
        said, calls = "", []
        while True:
            before, opened, rest = self._held.partition(OPEN)
            if not opened:
                keep = 0 if ended else _overlap(before, OPEN)
                self._held = before[len(before) - keep :]
                return said + self._text(before[: len(before) - keep]), calls
            inside, closed, after = rest.partition(CLOSE)
            if not closed and not ended:
                self._held = opened + rest
                return said + self._text(before), calls
            call = _one_call(inside, self._names)
            said += self._text(before if call else before + opened + inside + closed)
            if call:
                calls.append(call)
                self._after_call = True
            self._held = after

    def _text(self, text: str) -> str:
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        return text


class Llama3JsonReader:
    """See :class:`ToolCallReader`. An answer that begins with a brace is held back to its end."""

    def __init__(self, names: Collection[str]):
        self._names = names
        self._held = ""
        self._is_text = False

    def feed(self, text: str) -> Read:
        self._held += text
        begin = self._held.lstrip()[:1]
        self._is_text = self._is_text or begin not in ("", "{")
        return self._release() if self._is_text else ("", [])

    def end(self) -> Read:
        calls = [] if self._is_text else _calls(self._held, self._names)
        return ("", calls) if calls else self._release()

    def _release(self) -> Read:
        text, self._held = self._held, ""
        return text, []


FORMATS: dict[str, type[ToolCallReader]] = {"hermes": HermesReader, "llama3_json": Llama3JsonReader}


def format_of(templates: Iterable[str]) -> str | None:
    """Return the format that a model's chat templates ask it to write; None if it is none of :data:`FORMATS`."""
    text = "\n".join(templates)
    if "tools" not in text:
        return None
    if OPEN in text:  # others write XML inside
        return "hermes" if '"arguments"' in text and "<function=" not in text else None
    return "llama3_json" if '"parameters":' in text else None


def _overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of ``text`` may begin ``tag``."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-size:])), 0)


def _one_call(text: str, names: Collection[str]) -> ToolCall | None:
    calls = _calls(text, names)
    return calls[0] if len(calls) == 1 else None


def _calls(text: str, names: Collection[str]) -> list[ToolCall]:
    """Return the calls that ``text`` consists of; none if a part of it is anything else."""
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    calls: list[ToolCall] = []
    rest = text.strip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return []
        call = _call(value, names)
        if call is None:
            return []
        calls.append(call)
        rest = rest[end:].lstrip("; \n\t\r")
    return calls


def _call(value: Any, names: Collection[str]) -> ToolCall | None:
    if not isinstance(value, dict) or value.get("name") not in list(names):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")
