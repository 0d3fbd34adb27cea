"""What all clients and operators share: how to ask, what is known, and what is wrong."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

from nxd_server.errors import DEADLINE_GRACE
from tests.soak.books import Books, Metrics, read_metrics
from tests.soak.questions import Question, Told, told
from tests.soak.wire import Answer, Violation, Wire, request

SLOTS, QUEUE, BODY_BYTES = 8, 32, 1024 * 1024
REQUEST_TIMEOUT, CALL_TIMEOUT = 5.0, 6.0
"""A rank that is stopped is noticed after the deadline of those who wait for it, so that this is tried as well."""
GRACE = 3.0
"""Seconds beyond its deadline that an answer may take on a busy machine."""
ADMIN = "Authorization: Bearer root"
ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/weights", "/v1/adapters", "/v1/embeddings", "/v1/models",
          "/metrics", "/health", "/readyz", "/livez")  # fmt: skip
STATUS = {"timeout_error": 504, "service_unavailable_error": 503}
"""Of errors in streams."""
T = TypeVar("T")


class Soak:
    def __init__(self, port: int, grace: float = GRACE):
        self.port = port
        self.grace = grace
        self.bound = REQUEST_TIMEOUT + DEADLINE_GRACE + grace
        """An answer is here by then."""
        self.books = Books()
        self.version = 0
        """Of the weights, as far as it is known."""
        self.checkpoints = {0: 0}
        """By version, which of the two it is; of a version that may be there any moment too."""
        self.known: dict[tuple[int, int], Told] = {}
        """Answers by question's place and checkpoint."""
        self.questions: list[Question] = []
        self.adapters: dict[str, float] = {}
        """Adapters that requests may name, and since when."""

    async def within(self, what: str, work: Awaitable[T], bound: float | None = None) -> T:
        """The result of a part of some exchange. Violation for none in time."""
        bound = bound or self.bound
        try:
            return await asyncio.wait_for(work, bound)
        except asyncio.TimeoutError:
            raise Violation(f"{what}: not answered within {bound:g} s") from None

    async def open(self) -> Wire:
        return await self.within("a connection", Wire.open(self.port))

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *headers: str,
        pause: float = 0.0,
        bound: float | None = None,
        wire: Wire | None = None,
    ) -> Answer:
        """The whole answer, in time. Violation for none, for a 500, and for a refusal of another form."""
        what, begun, mine = f"{method} {path} {body[:600]!r}", time.monotonic(), wire is None
        self.books.sent[route_of(path)] += 1
        try:
            wire = wire or await self.open()
            data = request(method, path, body, *headers, *(["Connection: close"] if mine else []))
            await self.within(what, wire.send(data), bound)
            answer = await self.within(what, wire.answer(begun, pause), (bound or self.bound) + 120 * pause)
        except (OSError, EOFError, ValueError) as error:
            raise Violation(f"{what} was cut off ({error!r})") from error
        finally:
            if mine and wire is not None:
                wire.close()
        self.books.seen[route_of(path), answer.status] += 1
        if answer.status >= 400 and not (path in ("/readyz", "/health") and answer.status == 503):
            refused(answer)
        return answer

    def allow(self, answer: Answer, what: Any, *statuses: int) -> None:
        """Violation unless the answer has one of these statuses, or is a 503 while something is broken, or a 504 when
        the time is over."""
        late = answer.ended - answer.begun >= REQUEST_TIMEOUT - 0.1
        broken = answer.status == 503 and self.books.faulty(answer.begun, answer.ended)
        if answer.status not in statuses and not broken and not (answer.status == 504 and late):
            raise Violation(f"not one of {statuses} for {what}: {answer}")

    # --- answers ----------------------------------------------------------------------------------------

    def judge(self, place: int | None, asked: Question, answer: Answer, least_version: int) -> bool:
        """Whether the answer to a question is complete. ``place``: where its known answers are, if there are any;
        ``least_version``: what was served when it was asked."""
        if answer.status != 200:
            self.books.incomplete(asked)
            since = self.adapters.get(asked.model, math.inf) if asked.model else -math.inf
            # 404 if the adapter was not there all the time
            self.allow(answer, asked.body, 429, *([404] if since > answer.begun else []))
            return False
        said = told(asked, answer)
        if not isinstance(said, Told):
            self.books.incomplete(asked)
            status = STATUS.get(said["type"])
            if status is None or b"[DONE]" in answer.body:
                raise Violation(f"a stream was cut for {asked.body}: {answer}")
            self.books.kinds[f"cut {status}"] += 1
            self.allow(Answer(status, {}, answer.body, answer.begun, answer.ended), asked.body)
            return False
        self.books.complete(said)
        if said.version < least_version or said.version not in self.checkpoints:
            raise Violation(f"version {said.version} answered, {least_version} to {self.version} are known: {answer}")
        if place is not None:
            expected = self.known[place, self.checkpoints[said.version]]
            if not said.same(expected):
                raise Violation(
                    f"another answer than alone to {json.dumps(asked.body)} from version {said.version}:\n"
                    f"alone {expected}\nnow   {said}"
                )
        return True

    # --- the server -------------------------------------------------------------------------------------

    async def metrics(self) -> Metrics:
        answer = await self.ask("GET", "/metrics")
        self.allow(answer, "/metrics", 200)
        return read_metrics(answer.body.decode())

    async def ready(self) -> bool:
        return (await self.ask("GET", "/readyz")).status == 200

    async def rank_pids(self) -> list[int]:
        health = json.loads((await self.ask("GET", "/health")).body)
        return [rank["pid"] for rank in health["ranks"] if rank["pid"]]


def route_of(path: str) -> str:
    """As the server's metrics call it."""
    if path.startswith("/v1/adapters/"):
        return "/v1/adapters/{name:path}"
    return path if path in ROUTES else "unmatched"


def refused(answer: Answer) -> None:
    """Violation unless it is a refusal of OpenAI's shape, and no defect."""
    try:
        error = json.loads(answer.body)["error"]
        good = (
            set(error) == {"message", "type", "param", "code"}
            and all(isinstance(error[name], str) and error[name] for name in ("message", "type", "code"))
            and bool(answer.headers["x-request-id"])
            and (answer.status != 429 or int(answer.headers["retry-after"]) >= 1)
        )
    except (ValueError, KeyError, TypeError):
        good = False
    if not good or answer.status == 500:
        raise Violation(f"no proper refusal: {answer} {answer.headers}")
