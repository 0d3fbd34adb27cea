"""An answer of one choice as a list of blocks: its reasoning, its texts and its calls, as they come.

OpenAI's Responses and Anthropic's Messages both return these, each in its own form.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.responses import Response

from nxd_server.engine.request import FinishEvent, PromptEvent, Usage
from nxd_server.http.error_responses import bad_request, clip, encode, unsupported, wrong
from nxd_server.http.openai.chat import Conversation
from nxd_server.http.openai.generation import Answer, Generation, Given

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """A part of the answer; a call's text is its arguments."""

    kind: Kind
    index: int
    name: str = ""
    call_id: str = ""
    text: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


Move = tuple[Literal["start", "delta", "stop"], Block, str]
"""What happens to a block; the text is that of a delta."""


class BlockAnswer(Answer):
    """An answer that is divided into blocks while it comes; a route says how it shows them."""

    def __init__(self, one: Conversation):
        self.one = one
        self.blocks: list[Block] = []
        self.reason = ""
        self.stop: str | int | None = None
        self._open: Block | None = None
        self._blanks = ""
        """Whitespace that is text only if more of it follows; before a call it is none."""

    def take(self, event: Given) -> Iterator[Move]:
        """Take the next event of the only choice."""
        if isinstance(event, PromptEvent):
            return
        (parts,) = self.one.parts
        ended = isinstance(event, FinishEvent)
        if isinstance(event, FinishEvent):
            self.reason, self.stop = event.reason, event.stop
        elif not event.is_stop:
            parts.count(event.token)
        delta = parts.take(event.text, ended)
        if thought := delta.get("reasoning_content"):
            yield from self._add("reasoning", thought)
        text, self._blanks = self._blanks + delta.get("content", ""), ""
        calls = delta.get("tool_calls", [])
        if text.strip() or (text and self._open is not None and self._open.kind == "text"):
            yield from self._add("text", text)
        elif not calls:
            self._blanks = text
        for call in calls:
            function = call["function"]
            if "id" in call:
                yield from self._start(Block("call", len(self.blocks), function["name"], call["id"]))
            yield from self._add("call", function["arguments"])
        if ended:
            if self._blanks and not any(block.kind == "call" for block in self.blocks):
                yield from self._add("text", self._blanks)
            yield from self._stop()

    def _add(self, kind: Kind, text: str) -> Iterator[Move]:
        if self._open is None or self._open.kind != kind:
            yield from self._start(Block(kind, len(self.blocks)))
        if text and self._open is not None:
            self._open.text += text
            yield "delta", self._open, text

    def _start(self, block: Block) -> Iterator[Move]:
        yield from self._stop()
        self.blocks.append(block)
        self._open = block
        yield "start", block, ""

    def _stop(self) -> Iterator[Move]:
        if self._open is not None:
            block, self._open = self._open, None
            yield "stop", block, ""

    @property
    def reasoning_tokens(self) -> int:
        counter = self.one.parts[0].counter
        return 0 if counter is None else counter.count

    async def whole(self, generation: Generation) -> Response:
        async with generation:
            while generation.unfinished:
                if (item := await generation.next()) is not None:
                    for _ in self.take(item[1]):
                        pass
        return Response(encode(self.object(generation.usage)), media_type="application/json")

    def event(self, choice: int, event: Given) -> bytes:
        return b"".join([self.show(*move) for move in self.take(event)])

    def object(self, usage: Usage) -> dict[str, Any]:
        """Return the whole answer."""
        raise NotImplementedError

    def show(self, what: str, block: Block, text: str) -> bytes:
        """Return the events of a move."""
        raise NotImplementedError


def sse(event: str, data: dict[str, Any]) -> bytes:
    """Return a server-sent event with its name."""
    return b"event: " + event.encode() + b"\ndata: " + encode(data) + b"\n\n"


def text_parts(value: Any, where: str, kinds: tuple[str, ...]) -> str | list[dict[str, str]]:
    """Return content, a text or a list of parts of these ``kinds``, as a chat template takes it.

    Raises ApiError: 400 naming a part of another kind, such as an image.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong(where, "must be a string or a list of parts")
    found = []
    for place, part in enumerate(value):
        path = f"{where}[{place}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise unsupported(f"{path}.type", f"only text is read: {', '.join(kinds)}; got {clip(repr(kind))}")
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise wrong(f"{path}.text", "must be a string")
        found.append({"type": "text", "text": text})
    return found[0]["text"] if len(found) == 1 else found or ""


def check_answers(messages: list[dict[str, Any]], places: list[str], field: str) -> None:
    """Raise ApiError 400 for a tool's result, at ``field`` of its item, that answers no call before it."""
    called: set[str] = set()
    for message, place in zip(messages, places, strict=True):
        called |= {call["id"] for call in message.get("tool_calls", ())}
        asked = message.get("tool_call_id")
        if asked is not None and asked not in called:
            raise bad_request(f"`{place}.{field}`: no call before it has the id {clip(asked)!r}", f"{place}.{field}")
