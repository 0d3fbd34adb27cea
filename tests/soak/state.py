"""What all clients and operators share: how to ask, what is known, and what is wrong."""

from __future__ import annotations

import http.client
import json
import math
import time
from typing import Any

from nxd_server.errors import DEADLINE_GRACE
from tests.soak.books import Books, read_metrics
from tests.soak.questions import Answer, Question, Told, told
from tests.support.http.http_servers import is_error

RANKS, SLOTS, QUEUE, BODY_BYTES = 2, 8, 32, 1024 * 1024
"""Of each copy: ranks, slots, and requests that may wait."""
REQUEST_TIMEOUT, CALL_TIMEOUT = 5.0, 6.0
"""A rank that is stopped is noticed after the deadline of those who wait for it, so that this is tried as well."""
GRACE = 3.0
"""Seconds beyond its deadline that an answer may take on a busy machine."""
STATUS = {"timeout_error": 504, "service_unavailable_error": 503}
"""Of errors in streams."""


class Soak:
    def __init__(self, port: int, grace: float = GRACE, copies: int = 1):
        self.port, self.copies = port, copies
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

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.bound)

    def ask(self, method: str, path: str, body: bytes = b"", **how: Any) -> Answer:
        """The whole answer, in time; an AssertionError for none, for a 500, and for a refusal of another form. ``how``:
        see :meth:`exchange`."""
        own, headers = self.connection(), how.pop("headers", {})
        wire = how.pop("wire", own)
        try:
            send = lambda: wire.request(method, path, body or None, headers)  # noqa: E731
            return self.exchange(wire, send, f"{method} {path} {body[:600]!r}", **how)
        finally:
            own.close()

    def exchange(self, wire: Any, send: Any, what: str, bound: float | None = None, pause: float = 0.0) -> Answer:
        """What is answered over a connection to what ``send`` sends; it is read with pauses."""
        begun, parts = time.monotonic(), []
        end = begun + (bound or self.bound) + 120 * pause
        wire.timeout = bound or self.bound
        try:
            send()
            response = wire.getresponse()
            assert response.chunked or response.length is not None, f"{what} was cut off"
            while part := response.read1(4096 if pause else -1):
                if time.monotonic() > end:
                    raise TimeoutError
                parts.append(part)
                time.sleep(pause)
            assert not response.length, f"{what} was cut off"
            response.close()
        except TimeoutError:
            raise AssertionError(f"{what}: not answered within {end - begun:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise AssertionError(f"{what} was cut off ({error!r})") from error
        answer = Answer(response.status, response.getheaders(), b"".join(parts), begun, time.monotonic())
        self.books.add(self.books.seen, answer.status_code)
        if answer.status_code >= 400 and not what.startswith(("GET /readyz", "GET /health")):
            refused(answer)
        return answer

    def allow(self, answer: Answer, what: Any, *statuses: int) -> None:
        """It has one of these statuses, or is a 503 while something is broken, or a 504 when the time is over."""
        late = answer.status_code == 504 and answer.ended - answer.begun >= REQUEST_TIMEOUT - 0.1
        broken = answer.status_code == 503 and self.books.faulty(answer.begun, answer.ended)
        assert answer.status_code in statuses or broken or late, f"not one of {statuses} for {what}: {answer}"

    def judge(self, place: int | None, asked: Question, answer: Answer, least_version: int) -> Told | None:
        """What the answer to a question says, if it is complete. ``place``: where its known answers are, if there are
        any; ``least_version``: what was served when it was asked."""
        if answer.status_code != 200:
            self.books.incomplete(asked)
            since = self.adapters.get(asked.body["model"], math.inf) if "model" in asked.body else -math.inf
            # 404 if the adapter was not there all the time
            self.allow(answer, asked.body, 429, *([404] if since > answer.begun else []))
            return None
        try:
            said = told(asked, answer)
        except Exception as error:
            raise AssertionError(f"{error!r} of the answer to {asked.body}: {answer}") from error
        if not isinstance(said, Told):
            self.books.incomplete(asked)
            status = STATUS.get(said, 500)
            self.books.add(self.books.kinds, f"cut {status}")
            self.allow(Answer(status, {}, answer.content, answer.begun, answer.ended), asked.body)
            return None
        self.books.complete(said)
        known = said.version >= least_version and said.version in self.checkpoints
        assert known, f"version {said.version} answered, {least_version} to {self.version} are known: {answer}"
        if place is not None:
            expected = self.known[place, self.checkpoints[said.version]]
            assert said.same(expected), (
                f"another answer than alone to {json.dumps(asked.body)} from version {said.version}:\n"
                f"alone {expected}\nnow   {said}"
            )
        return said

    def metrics(self) -> list[Any]:
        answer = self.ask("GET", "/metrics")
        self.allow(answer, "/metrics", 200)
        return read_metrics(answer.text)

    def whole(self) -> bool:
        """Whether every copy is ready."""
        health = self.ask("GET", "/health")
        models = health.json().get("models", {}).values()
        return health.status_code == 200 and all(
            one["status"] == "ready" for model in models for one in model["copies"]
        )

    def rank_pids(self) -> list[int]:
        health = self.ask("GET", "/health").json()
        return [rank["pid"] for rank in health["ranks"] if rank["pid"]]


def refused(answer: Answer) -> None:
    """It is a refusal of OpenAI's shape, and no defect."""
    is_error(answer, answer.status_code)
    after = int(answer.headers["retry-after"]) if answer.status_code == 429 else 1
    assert answer.status_code != 500 and after >= 1, f"no proper refusal: {answer}"
