"""Random requests, what an answer to one says, and whether two answers are the same."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from tests.soak.wire import Answer, Violation
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
"""What some answers are bound to."""
CLOSE = 2e-3
"""Log-probabilities of one token in batches of different shapes differ by roundings."""


@dataclass(frozen=True)
class Question:
    path: str
    body: dict[str, Any]
    choices: int
    exact: bool
    """Greedy or seeded: always the same answer."""

    @property
    def most_tokens(self) -> int:
        return self.choices * self.body["max_tokens"]

    @property
    def model(self) -> str | None:
        return self.body.get("model")

    def bytes(self, stream: bool = False) -> bytes:
        more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return json.dumps(self.body | more).encode()


@dataclass
class Choice:
    text: str = ""
    reason: str | None = None
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def add(self, part: dict[str, Any]) -> None:
        chat = part.get("message") or part.get("delta") or {}
        self.text += chat.get("content") or part.get("text") or ""
        self.reason = part.get("finish_reason")
        table = part.get("logprobs") or {}
        for entry in table.get("content") or []:
            self.tokens.append(entry["token"])
            self.logprobs.append(entry["logprob"])
        self.tokens += table.get("tokens") or []
        self.logprobs += table.get("token_logprobs") or []

    def same(self, other: Choice) -> bool:
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return (self.text, self.reason, self.tokens) == (other.text, other.reason, other.tokens) and all(
            abs(one - two) < CLOSE for one, two in pairs
        )


@dataclass
class Told:
    """What an answer says."""

    choices: list[Choice]
    completion_tokens: int
    version: int

    def same(self, other: Told) -> bool:
        """Whatever the versions."""
        pairs = zip(self.choices, other.choices, strict=True)
        return self.completion_tokens == other.completion_tokens and all(one.same(two) for one, two in pairs)


def question(rng: random.Random, *, exact: bool = True, model: str | None = None, long: bool = False) -> Question:
    """A random one. ``long``: many choices of many tokens, which take seconds."""
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
    body |= _sampling(rng, exact)
    if rng.random() < 0.2:
        body["min_tokens"] = rng.randint(1, body["max_tokens"])
    if long:
        body |= {"max_tokens": 100, "n": 6, "ignore_eos": True, "stop": []}
    elif rng.random() < 0.2:
        body["n"] = rng.randint(2, 4)
    if rng.random() < 0.3:
        most = rng.randint(0, 5)
        body |= {"logprobs": True, "top_logprobs": most} if path == CHAT else {"logprobs": most}
    if rng.random() < 0.15:
        body["structured_outputs"] = dict([rng.choice(FORMS)])
        body.pop("min_tokens", None)  # the form's end comes first
    return Question(path, body, prompts * body.get("n", 1), exact)


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, words)))


def _sampling(rng: random.Random, exact: bool) -> dict[str, Any]:
    if exact and rng.random() < 0.5:
        body: dict[str, Any] = {"temperature": 0}
    else:
        body = {"temperature": round(rng.uniform(0.3, 1.5), 2)} | ({"seed": rng.randrange(2**40)} if exact else {})
    some = {
        "top_p": 0.9, "top_k": 20, "min_p": 0.05, "presence_penalty": 0.7, "frequency_penalty": -0.4,
        "repetition_penalty": 1.3, "stop": rng.sample(STOPS, rng.randint(1, 3)), "ignore_eos": True,
        "stop_token_ids": [rng.randrange(5, VOCAB_SIZE) for _ in range(8)],
        "logit_bias": {str(rng.randrange(5, VOCAB_SIZE)): rng.choice((-100, -5, 5)) for _ in range(3)},
    }  # fmt: skip
    return body | {name: value for name, value in some.items() if rng.random() < 0.2}


def told(asked: Question, answer: Answer) -> Told | dict[str, Any]:
    """What an answer of status 200 says; the error in its stream where that was cut. Violation for any other form."""
    try:
        if answer.headers["content-type"].startswith("text/event-stream"):
            *events, last = events_of(answer.body.decode())
            if last != "[DONE]":
                return last["error"]
        else:
            events = [json.loads(answer.body)]
        choices = [Choice() for _ in range(asked.choices)]
        for event in events:
            for part in event["choices"]:
                if choices[part["index"]].reason is not None:
                    raise Violation(f"a chunk behind the end of its choice: {event}")
                choices[part["index"]].add(part)
        (version,) = {event["weight_version"] for event in events}
        said = Told(choices, events[-1]["usage"]["completion_tokens"], version)
    except Violation:
        raise
    except Exception as error:
        raise Violation(f"an answer of no known form ({error!r}) to {asked.body}: {answer}") from error
    return _checked(asked, answer, said)


def _checked(asked: Question, answer: Answer, said: Told) -> Told:
    """What holds of every answer, known or not."""
    fewest = asked.choices * max(1, asked.body.get("min_tokens", 1))
    if not fewest <= said.completion_tokens <= asked.most_tokens:
        raise Violation(f"{said.completion_tokens} tokens for {asked.body}: {answer}")
    stops = () if "min_tokens" in asked.body else asked.body.get("stop", ())  # text before so many may hold one
    for choice in said.choices:
        stopped = choice.reason == "length" and any(stop in choice.text for stop in stops)
        if choice.reason not in ("stop", "length") or stopped:
            raise Violation(f"a wrong end for {asked.body}: {answer}")
    return said
