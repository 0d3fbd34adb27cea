"""Divide the text of a choice into the parts of its message: reasoning, content and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nxd_server.http.openai.tools import ChoiceCalls
from nxd_server.text.reasoning import ReasoningCounter, ReasoningReader


class MessageParts:
    """Reads the text of one choice."""

    def __init__(
        self,
        reasoning: ReasoningReader | None,
        shown: bool,
        calls: ChoiceCalls,
        counter: ReasoningCounter | None = None,
    ):
        """``reasoning`` None: the answer has none. ``shown``: whether the message is to have the reasoning. ``counter``
        None: the model does not reason."""
        self._reasoning, self._shown, self._calls = reasoning, shown, calls
        self.counter = counter
        self._thoughts: list[str] = []

    def take(self, text: str, ended: bool = False) -> dict[str, Any]:
        """Return what the next piece of text adds to the message, as the delta of a chunk; only parts that it has."""
        thought = ""
        if self._reasoning is not None:
            thought, text = self._reasoning.feed(text)
            if ended:
                more, rest = self._reasoning.end()
                thought, text = thought + more, text + rest
        text, calls = self._calls.take(text, ended)
        if self._calls.optional and self._reasoning is not None and self._reasoning.place != "over":
            self._thoughts.append(thought)
            if ended:  # some models call a tool and leave the reasoning open
                _, calls = self._calls.take("".join(self._thoughts), ended)
        parts = {"reasoning_content": thought if self._shown else "", "content": text, "tool_calls": calls}
        return {name: part for name, part in parts.items() if part}

    def count(self, token: int) -> None:
        """Count a token of the answer; one that ends it is none."""
        if self.counter is not None:
            self.counter.take(token)

    def whole(self, text: str) -> dict[str, Any]:
        """Return the message of a choice with this text."""
        parts = self.take(text, ended=True)
        message = {"role": "assistant", "content": "", "refusal": None, "reasoning_content": None, **parts}
        calls = parts.get("tool_calls")
        if (calls or self._calls.forced) and not message["content"].strip():
            message["content"] = None
        if calls:
            message["tool_calls"] = [{name: call[name] for name in call if name != "index"} for call in calls]
        return message

    def reason(self, reason: str) -> str:
        """Return the choice's finish reason, from the engine's."""
        return self._calls.reason(reason)


def reasoning_tokens(parts: Sequence[MessageParts]) -> int | None:
    """Return how many tokens of all choices so far are reasoning; None if the model does not reason."""
    counters = [one.counter for one in parts if one.counter is not None]
    return sum(counter.count for counter in counters) if counters else None
