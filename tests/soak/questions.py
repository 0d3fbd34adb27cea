"""Random requests, what an answer to one says, and whether two answers are the same."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.support.http.http_servers import events_of
from tests.support.tiny_models import VOCAB_SIZE

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_LEN = 256
WORDS = ("the", "with", "statement", "for 7", "while", "é", "if x:", "try", "日本", "else", "import", "\n", "🙂", "def")
STOPS = ("e", "th", " a", "\n", "q;", "ing")
FORMS = (
    ("json", {"type": "array", "items": {"enum": ["the", 7, None]}, "maxItems": 9}),
    ("regex", "(if|for)( x| y){1,20}:"),
    ("choice", ["yes", "yes, but", "日本"]),
    ("grammar", 'start: "(" [start] ")"'),
)
CLOSE = 2e-3
"""Log-probabilities of one token in batches of different shapes differ by roundings."""


class Answer(httpx.Response):
    def __init__(self, status: int, headers: Any, body: bytes, begun: float, ended: float):
        super().__init__(status, headers=headers, content=body)
        self.begun, self.ended = begun, ended

    def __str__(self) -> str:
        return f"{self.status_code} after {self.ended - self.begun:.2f} s: {self.content[-600:]!r}"


@dataclass(frozen=True)
class Question:
    path: str
    body: dict[str, Any]
    choices: int

    @property
    def most_tokens(self) -> int:
        return self.choices * self.body["max_tokens"]

    def bytes(self, stream: bool = False) -> bytes:
        more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return json.dumps(self.body | more).encode()


@dataclass
class Choice:
    text: str = ""
    reason: str | None = None
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list, compare=False)

    def add(self, part: dict[str, Any]) -> None:
        assert self.reason is None, "a chunk behind the end of its choice"
        chat = part.get("message") or part.get("delta") or {}
        self.text += chat.get("content") or part.get("text") or ""
        self.reason = part.get("finish_reason")
        table = part.get("logprobs") or {}
        content = table.get("content") or []
        self.tokens += table.get("tokens") or [entry["token"] for entry in content]
        self.logprobs += table.get("token_logprobs") or [entry["logprob"] for entry in content]


@dataclass
class Told:
    """What an answer says."""

    choices: list[Choice]
    tokens: int
    version: int

    def same(self, other: Told) -> bool:
        """Whatever the versions."""
        return (self.choices, self.tokens) == (other.choices, other.tokens) and all(
            one.logprobs == pytest.approx(two.logprobs, abs=CLOSE)
            for one, two in zip(self.choices, other.choices, strict=True)
        )


def question(rng: random.Random, *, exact: bool = True, model: str | None = None, long: bool = False) -> Question:
    """A random one. ``exact``: greedy or seeded, so that the answer is always the same; ``long``: many choices of many
    tokens, which take seconds."""
    body: dict[str, Any] = {"max_tokens": rng.choice((1, 2, 5, rng.randint(1, 30), rng.randint(1, 90)))}
    prompts = 1
    path = CHAT if rng.random() < 0.25 else COMPLETIONS
    if path == CHAT:
        roles = ["system"] * rng.randint(0, 1) + ["user", "assistant"] * rng.randint(0, 1) + ["user"]
        body["messages"] = [{"role": role, "content": _text(rng, 4)} for role in roles]
    elif rng.random() < 0.5:
        body["prompt"] = _text(rng, 10)
    elif rng.random() < 0.3:
        prompts = rng.randint(2, 3)
        body["prompt"] = [_text(rng, 5) for _ in range(prompts)]
    else:
        body["prompt"] = [rng.randrange(5, VOCAB_SIZE) for _ in range(rng.choice((1, 16, 17, rng.randint(1, 150))))]
    if model is not None:
        body["model"] = model
    if exact and rng.random() < 0.5:
        body["temperature"] = 0
    else:
        body |= {"temperature": round(rng.uniform(0.3, 1.5), 2)} | ({"seed": rng.randrange(2**40)} if exact else {})
    some = {
        "top_p": 0.9, "top_k": 20, "min_p": 0.05, "presence_penalty": 0.7, "frequency_penalty": -0.4,
        "repetition_penalty": 1.3, "stop": rng.sample(STOPS, rng.randint(1, 3)), "ignore_eos": True,
        "stop_token_ids": [rng.randrange(5, VOCAB_SIZE) for _ in range(8)],
        "logit_bias": {str(rng.randrange(5, VOCAB_SIZE)): rng.choice((-100, -5, 5)) for _ in range(3)},
        "min_tokens": rng.randint(1, body["max_tokens"]), "n": rng.randint(2, 4),
    }  # fmt: skip
    body |= {name: value for name, value in some.items() if rng.random() < 0.2}
    if long:
        body |= {"max_tokens": 100, "n": 6, "ignore_eos": True, "stop": []}
    if rng.random() < 0.3:
        most = rng.randint(0, 5)
        body |= {"logprobs": True, "top_logprobs": most} if path == CHAT else {"logprobs": most}
    if rng.random() < 0.15:
        body["structured_outputs"] = dict([rng.choice(FORMS)])
        body.pop("min_tokens", None)  # the form's end comes first
    return Question(path, body, prompts * body.get("n", 1))


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, words)))


def told(asked: Question, answer: Answer) -> Told | str:
    """What an answer of status 200 says; the type of the error in its stream where that was cut."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        *events, last = events_of(answer.text)
        if last != "[DONE]":
            assert "[DONE]" not in events
            return last["error"]["type"]
    else:
        events = [answer.json()]
    choices = [Choice() for _ in range(asked.choices)]
    for event in events:
        for part in event["choices"]:
            choices[part["index"]].add(part)
    (version,) = {event["weight_version"] for event in events}
    tokens = events[-1]["usage"]["completion_tokens"]
    assert asked.choices * max(1, asked.body.get("min_tokens", 1)) <= tokens <= asked.most_tokens, f"{tokens} tokens"
    stops = () if "min_tokens" in asked.body else asked.body.get("stop", ())  # text before so many may hold one
    for choice in choices:
        assert choice.reason in ("stop", "length"), "a wrong end"
        assert choice.reason == "stop" or not any(stop in choice.text for stop in stops), "it goes on behind a stop"
    return Told(choices, tokens, version)
