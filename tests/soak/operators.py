"""What is done to a server while it serves: weights swapped, adapters changed, ranks killed and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable

from tests.soak.books import Fault, total
from tests.soak.state import ADMIN, CALL_TIMEOUT, Soak
from tests.soak.tasks import all_of
from tests.soak.wire import Answer, Violation

CHECKPOINTS = ("model", "other")
"""Under the server's root; the first is what was traced."""
ADAPTERS = ("x", "y", "z")
"""For two slots."""
RECOVERY_SECONDS = 60.0
CHANGE_SECONDS = 30.0


async def swap(soak: Soak, timeout: float = CHANGE_SECONDS, times: int = 1) -> None:
    """The other checkpoint, if running requests end in time. ``times``: asked so often at the same moment."""
    before = soak.version
    other = 1 - soak.checkpoints[before]
    coming = [before + 1 + number for number in range(times)]
    soak.checkpoints |= dict.fromkeys(coming, other)  # an answer may name one before the swap's own answer is here
    body = {"path": CHECKPOINTS[other], "timeout": timeout}
    answers = await asyncio.gather(*(_change(soak, "POST", "/v1/weights", body) for _ in coming))
    versions = sorted(json.loads(answer.body)["version"] for answer in answers if answer.status == 200)
    for answer in answers:
        if answer.status != 200:
            soak.allow(answer, body, 409)
    if versions != coming[: len(versions)]:
        raise Violation(f"swaps of version {before} gave {versions}")
    soak.version += len(versions)
    for version in coming[len(versions) :]:
        del soak.checkpoints[version]


async def load(soak: Soak, name: str) -> bool:
    answer = await _change(soak, "POST", "/v1/adapters", {"name": name, "path": f"adapters/{name}"})
    if answer.status != 200:
        soak.allow(answer, f"loading {name}", 409)
        return False
    soak.adapters[name] = time.monotonic()
    return True


async def unload(soak: Soak, name: str) -> None:
    since = soak.adapters.pop(name)
    answer = await _change(soak, "DELETE", f"/v1/adapters/{name}")
    if answer.status != 200:
        soak.adapters[name] = since
        soak.allow(answer, f"taking {name} away")


async def _change(soak: Soak, method: str, path: str, body: dict | None = None) -> Answer:
    data = b"" if body is None else json.dumps(body).encode()
    return await soak.ask(method, path, data, ADMIN, bound=CHANGE_SECONDS + RECOVERY_SECONDS)


async def swapper(soak: Soak, rng: random.Random, until: float) -> None:
    while await _pause(rng.uniform(0.5, 6.0), until):
        await swap(soak, timeout=rng.choice((0.01, 2.0, CHANGE_SECONDS)), times=rng.choice((1, 1, 1, 2)))


async def adapter_keeper(soak: Soak, rng: random.Random, until: float) -> None:
    while await _pause(rng.uniform(0.2, 4.0), until):
        name = rng.choice(ADAPTERS)
        if name in soak.adapters:
            await unload(soak, name)
        else:
            await load(soak, name)


async def breaker(soak: Soak, rng: random.Random, until: float) -> None:
    """Now and then something breaks."""
    least = 2.0
    while await _pause(rng.uniform(least, least + 4.0), until - 2.0):
        kind = rng.choice(("kill", "kill all", "stop", "hiccup"))
        soak.books.kinds[kind] += 1
        pids = await soak.rank_pids()
        victim = rng.choice(pids)
        if kind == "hiccup":
            stall = Fault(time.monotonic())
            soak.books.stalls.append(stall)
            os.kill(victim, signal.SIGSTOP)
            await asyncio.sleep(rng.uniform(0.1, CALL_TIMEOUT / 4))
            os.kill(victim, signal.SIGCONT)
            await _until(soak, soak.ready)
            stall.ended = time.monotonic()
        else:
            fault = soak.books.begin_fault()
            number = signal.SIGSTOP if kind == "stop" else signal.SIGKILL
            for pid in pids if kind == "kill all" else [victim]:
                with contextlib.suppress(ProcessLookupError):  # the death of the first has ended the others
                    os.kill(pid, number)
            await _recovered(soak, fault, pids)
        least = 8.0


async def _recovered(soak: Soak, fault: Fault, pids: list[int]) -> None:
    """Other ranks, counted as one restart more, and ready."""
    soak.books.restarts += 1

    async def back() -> bool:
        restarts = total(await soak.metrics(), "nxd_engine_restarts_total")
        return restarts >= soak.books.restarts and await soak.ready()

    await _until(soak, back)
    if set(pids) & set(await soak.rank_pids()):
        raise Violation(f"ranks of {pids} are left after a restart")
    fault.ended = time.monotonic()


async def _until(soak: Soak, holds: Callable[[], Awaitable[bool]]) -> None:
    end = time.monotonic() + RECOVERY_SECONDS + soak.grace
    while not await holds():
        if time.monotonic() > end:
            raise Violation(f"not ready within {RECOVERY_SECONDS:g} s of a fault of the ranks")
        await asyncio.sleep(0.2)


async def _pause(seconds: float, until: float) -> bool:
    """False when the end comes first."""
    await asyncio.sleep(max(0.0, min(seconds, until - time.monotonic())))
    return time.monotonic() < until


async def operate(soak: Soak, rng: random.Random, until: float) -> None:
    seeds = [random.Random(rng.random()) for _ in range(3)]
    await all_of(
        *(work(soak, seed, until) for work, seed in zip((swapper, adapter_keeper, breaker), seeds, strict=True))
    )
