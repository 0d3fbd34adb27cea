"""What a generation's tokens become in an answer: calls, reasoning, comments while a call is held back."""

from __future__ import annotations

import asyncio
from unittest.mock import AsyncMock, Mock

import pytest

from nxd_server.http.openai.chat import MessageParts
from nxd_server.http.openai.generation import DONE, KEEP_ALIVE, EventStream
from nxd_server.http.openai.tools import ChoiceCalls
from nxd_server.text.reasoning import FORMATS, ReasoningReader

CALL = '{"name": "weather", "arguments": {"city": "Bern"}}'


class Held:
    """A generation whose tokens, one in 20 ms, all belong to a call that is held back."""

    weight_version, usage, unfinished, left = 0, None, True, 12

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass

    async def next(self, wait):
        await asyncio.sleep(min(0.02, wait))
        self.left -= wait > 0.02
        self.unfinished = self.left > 0
        return (0, None) if wait > 0.02 else None

    def ready(self):
        return None

    def check_client(self):
        pass


def test_a_held_call_is_no_silence():
    nothing_yet = {
        "begin.return_value": b"data: begun",
        "event.return_value": b"",
        "end.return_value": DONE,
        "KEEP_ALIVE": KEEP_ALIVE,
    }
    stream, send = EventStream(Held(), Mock(**nothing_yet), keep_alive=0.1), AsyncMock()
    asyncio.run(stream({"type": "http"}, None, send))
    sent = [call.args[0].get("body", b"") for call in send.await_args_list]
    assert sent[1] == b"data: begun" and sent[-1].endswith(b"[DONE]\n\n")
    assert sent[2:-1] and set(sent[2:-1]) == {KEEP_ALIVE}


@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_in_reasoning_that_is_left_open_is_made(size):
    """As some models do; in reasoning that is closed it is a thought."""
    call = f"Look.\n<tool_call>\n{CALL}\n</tool_call>"
    for text, names, reason in ((call, ["weather"], "tool_calls"), (f"{call}</think>No.", [], "stop")):
        reader = ReasoningReader(FORMATS["think"], "inside")
        parts = MessageParts(reader, True, ChoiceCalls("hermes", ["weather"], True))
        found = [parts.take(text[place : place + size]) for place in range(0, len(text), size)]
        found.append(parts.take("", ended=True))
        calls = [call["function"]["name"] for part in found for call in part.get("tool_calls", [])]
        assert calls == names and parts.reason("stop") == reason
        thoughts = "".join(part.get("reasoning_content", "") for part in found)
        assert thoughts == call and "".join(part.get("content", "") for part in found) == text[len(call) :][8:]
