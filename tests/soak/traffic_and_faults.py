"""The traffic, each kind one thing that some client does, and what is done to the server meanwhile: weights swapped,
adapters changed, ranks killed and stopped."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.soak.books import read_metrics, total
from tests.soak.questions import CHAT, COMPLETIONS, Question, question
from tests.soak.state import BODY_BYTES, QUEUE, RANKS, REQUEST_TIMEOUT, SLOTS, Soak
from tests.support.http.http_servers import http_request, wait_for

ADMIN_KEY = "root"
CHECKPOINTS = ("model", "other")
"""Under the server's root; the first is what was traced."""
ADAPTERS = ("x", "y", "z")
"""For two slots."""
CHANGE_SECONDS, RECOVERY_SECONDS = 30.0, 60.0
SWAPS_SECONDS = CHANGE_SECONDS + RECOVERY_SECONDS
"""How long the weights are sent again where only some copies have them."""


def client(soak: Soak, rng: random.Random, until: float) -> None:
    """Do one thing after the other until the moment ``until``."""
    kinds, weights = list(KINDS), list(KINDS.values())
    while time.monotonic() < until:
        (kind,) = rng.choices(kinds, weights)
        soak.books.add(soak.books.kinds, kind.__name__)
        kind(soak, rng)
        if rng.random() < 0.3:
            time.sleep(rng.expovariate(20))


def put(soak: Soak, place: int | None, asked: Question, stream: bool, **how: Any) -> None:
    version = soak.version
    answer = soak.ask("POST", asked.path, asked.bytes(stream), **how)
    soak.judge(place, asked, answer, version)
    if answer.status_code in (429, 503):
        time.sleep(0.1)


def _known(soak: Soak, rng: random.Random) -> tuple[int, Question]:
    place = rng.randrange(len(soak.questions))
    return place, soak.questions[place]


def ask(soak: Soak, rng: random.Random) -> None:
    """One request, or some after each other over one connection; some answers are read with pauses."""
    wire, pause = soak.connection(), rng.uniform(0.0, 0.04) if rng.random() < 0.05 else 0.0
    for _ in range(rng.choice((1, 1, 1, 1, 1, 1, 2, 3))):
        put(soak, *_known(soak, rng), rng.random() < 0.5, wire=wire, pause=pause)
    wire.close()


def unseeded(soak: Soak, rng: random.Random) -> None:
    asked = question(rng, exact=False, model=rng.choice((None, None, "x", "z")))
    put(soak, None, asked, rng.random() < 0.5)


def burst(soak: Soak, rng: random.Random) -> None:
    """More at once than there is room for, and some that take longer than they may."""
    asked = [_known(soak, rng) for _ in range(rng.randint(5, 25))]
    giants = [(None, question(rng, exact=False, long=True)) for _ in range(rng.randint(0, 5))]
    with ThreadPoolExecutor(len(asked) + len(giants)) as threads:
        for _ in threads.map(lambda one: put(soak, *one, rng.random() < 0.5), [*asked, *giants]):
            pass


def leave(soak: Soak, rng: random.Random) -> None:
    """Ask, read some of it or nothing, and go; one half resets the connection."""
    asked = question(rng, exact=False, long=True) if rng.random() < 0.3 else _known(soak, rng)[1]
    soak.books.incomplete(asked)
    soak.books.add(soak.books.kinds, "left")
    data = http_request(asked.path, asked.bytes(rng.random() < 0.7))
    with socket.create_connection(("127.0.0.1", soak.port), soak.bound) as wire:
        wire.settimeout(REQUEST_TIMEOUT + soak.bound)
        wire.sendall(data if rng.random() < 0.8 else data[: -rng.randint(1, 20)])
        if rng.random() < 0.5:
            time.sleep(rng.uniform(0.0, 0.5))
        else:
            wire.recv(rng.choice((1, 300, 3000)))
        if rng.random() < 0.5:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def half(soak: Soak, rng: random.Random) -> None:
    """A body that never ends gets an error at the deadline."""
    wire, body = soak.connection(), b'{"prompt": "half", "max_tokens": 3}'

    def send() -> None:
        wire.putrequest("POST", COMPLETIONS)
        wire.putheader("Content-Length", str(len(body)))
        wire.endheaders(body[: -rng.randint(1, 30)])

    soak.allow(soak.exchange(wire, send, "half a request"), "half a request")
    wire.close()


VALUES = {
    "temperature": "hot", "n": 1000, "max_tokens": 10**6, "prompt": [1] * 300_000, "stop": ["a"] * 2000,
    "min_tokens": 3, "structured_outputs": {"grammar": "start: nothing"}, "secret": 1,
}  # fmt: skip
MALFORMED = [
    *(("POST", COMPLETIONS, json.dumps({"prompt": "a", "max_tokens": 2, name: value}).encode(), 400)
      for name, value in VALUES.items()),
    ("POST", COMPLETIONS, b'{"prompt": "a", "model": "nobody"}', 404),
    ("POST", COMPLETIONS, b"a" * 2 * BODY_BYTES, 413),
    ("POST", COMPLETIONS, b'{"prompt": "\xff"}', 400),
    ("POST", COMPLETIONS, b'{"prompt": "\\ud800"}', 400),
    ("POST", COMPLETIONS, b"[" * 5000, 400),
    ("POST", CHAT, b'{"messages": [{"role": "nobody", "content": 1}]}', 400),
    ("POST", "/v1/embeddings", b'{"input": "a"}', 400),
    ("POST", "/v1/weights", b'{"path": "other"}', 401),
    ("GET", COMPLETIONS, b"", 405),
    ("PUT", "/nowhere", b"x", 404),
]  # fmt: skip


def malformed(soak: Soak, rng: random.Random) -> None:
    method, path, body, status = rng.choice(MALFORMED)
    soak.allow(soak.ask(method, path, body), (method, path, body[:200]), status)


def look(soak: Soak, rng: random.Random) -> None:
    """What a load balancer and a scraper do."""
    path = rng.choice(("/metrics", "/health", "/readyz", "/livez", "/v1/models", "/v1/adapters"))
    answer = soak.ask("GET", path)
    soak.allow(answer, path, 200)
    if path == "/metrics":
        metrics = read_metrics(answer.text)
        names = ("nxd_slots_free", "nxd_num_requests_running", "nxd_num_requests_waiting")
        free, running, waiting = (total(metrics, name) for name in names)
        slots = SLOTS * soak.copies
        right = free + running == slots and 0 <= free <= slots and 0 <= waiting <= slots + QUEUE * soak.copies
        assert right, f"{free:g} of {slots} slots free, {running:g} choices run, {waiting:g} wait"


KINDS: dict[Callable[[Soak, random.Random], None], float] = {
    ask: 70, unseeded: 8, leave: 9, malformed: 10, half: 0.5, look: 6, burst: 1.5,
}  # fmt: skip


# --- operators ------------------------------------------------------------------------------------------


def _change(soak: Soak, method: str, path: str, /, **body: Any) -> Any:
    data, headers = json.dumps(body).encode() if body else b"", {"Authorization": f"Bearer {ADMIN_KEY}"}
    answer = soak.ask(method, path, data, headers=headers, bound=CHANGE_SECONDS + RECOVERY_SECONDS)
    soak.allow(answer, (method, path, body), 200, *([409] if body else []))
    return answer


def swap(soak: Soak, timeout: float = CHANGE_SECONDS) -> None:
    """The other checkpoint, if running requests end in time; once a copy has it, all must get it."""
    other, mixed = 1 - soak.checkpoints[soak.version], False
    end = time.monotonic() + SWAPS_SECONDS
    while time.monotonic() < end:
        coming = max(soak.checkpoints) + 1
        soak.checkpoints[coming] = other  # an answer may name it before the swap's own answer is here
        answer = _change(soak, "POST", "/v1/weights", path=CHECKPOINTS[other], timeout=timeout)
        if answer.status_code == 200:
            soak.version = coming
            assert answer.json()["version"] == coming
            return
        if "copies have the new weights" in answer.text:
            mixed, timeout = True, CHANGE_SECONDS
            continue
        del soak.checkpoints[coming]
        if not mixed:
            return
        time.sleep(0.5)
    raise AssertionError(f"the copies have different weights, which swaps did not end in {SWAPS_SECONDS} s: {answer}")


def load(soak: Soak, name: str) -> None:
    if _change(soak, "POST", "/v1/adapters", name=name, path=f"adapters/{name}").status_code == 200:
        soak.adapters[name] = time.monotonic()


def unload(soak: Soak, name: str) -> None:
    since = soak.adapters.pop(name)
    if _change(soak, "DELETE", f"/v1/adapters/{name}").status_code != 200:
        soak.adapters[name] = since


def swapper(soak: Soak, rng: random.Random, until: float) -> None:
    while _pause(rng.uniform(0.5, 6.0), until):
        swap(soak, timeout=rng.choice((0.01, 2.0, CHANGE_SECONDS)))


def adapter_keeper(soak: Soak, rng: random.Random, until: float) -> None:
    while _pause(rng.uniform(0.2, 4.0), until):
        name = rng.choice(ADAPTERS)
        (unload if name in soak.adapters else load)(soak, name)


def breaker(soak: Soak, rng: random.Random, until: float) -> None:
    """Now and then ranks are killed, or stop: others come, counted as one restart more, and are ready in time."""
    least = 2.0
    while _pause(rng.uniform(least, least + 4.0), until - 2.0):
        kind = rng.choice(("kill", "kill all", "stop"))
        soak.books.add(soak.books.kinds, kind)
        pids = soak.rank_pids()
        copies = [pids[place : place + RANKS] for place in range(0, len(pids), RANKS)]
        broken = copies if kind == "kill all" else [rng.choice(copies)]
        with soak.books.fault():
            for copy in broken:
                for pid in copy if kind == "kill all" else [rng.choice(copy)]:
                    with contextlib.suppress(ProcessLookupError):  # the death of the first has ended the others
                        os.kill(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
            soak.books.restarts += len(broken)
            wait_for(lambda: _recovered(soak), RECOVERY_SECONDS + soak.grace, "not ready after a fault of the ranks")
            left = {pid for copy in broken for pid in copy} & {*soak.rank_pids()}
            assert not left, f"ranks {left} are left after a restart"
        least = 8.0


def _recovered(soak: Soak) -> bool:
    time.sleep(0.2)
    restarts = total(soak.metrics(), "nxd_engine_restarts_total")
    return restarts >= soak.books.restarts and soak.whole()


def _pause(seconds: float, until: float) -> bool:
    """False when the end comes first."""
    time.sleep(max(0.0, min(seconds, until - time.monotonic())))
    return time.monotonic() < until
