"""What is done to a server while it serves: weights swapped, adapters changed, ranks killed and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time

from tests.soak.books import Fault, total
from tests.soak.state import ADMIN, Soak
from tests.soak.wire import Answer, Violation, all_of

CHECKPOINTS = ("model", "other")
"""Under the server's root; the first is what was traced."""
ADAPTERS = ("x", "y", "z")
"""For two slots."""
RECOVERY_SECONDS = 60.0
CHANGE_SECONDS = 30.0


async def swap(soak: Soak, timeout: float = CHANGE_SECONDS) -> None:
    """The other checkpoint, if running requests end in time."""
    coming, other = soak.version + 1, 1 - soak.checkpoints[soak.version]
    soak.checkpoints[coming] = other  # an answer may name it before the swap's own answer is here
    body = {"path": CHECKPOINTS[other], "timeout": timeout}
    answer = await _change(soak, "POST", "/v1/weights", body)
    if answer.status != 200:
        soak.allow(answer, body, 409)
        del soak.checkpoints[coming]
    elif (found := json.loads(answer.body)["version"]) != coming:
        raise Violation(f"a swap of version {soak.version} gave {found}")
    else:
        soak.version = coming


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
        await swap(soak, timeout=rng.choice((0.01, 2.0, CHANGE_SECONDS)))


async def adapter_keeper(soak: Soak, rng: random.Random, until: float) -> None:
    while await _pause(rng.uniform(0.2, 4.0), until):
        name = rng.choice(ADAPTERS)
        if name in soak.adapters:
            await unload(soak, name)
        else:
            await load(soak, name)


async def breaker(soak: Soak, rng: random.Random, until: float) -> None:
    """Now and then ranks are killed, or stop."""
    least = 2.0
    while await _pause(rng.uniform(least, least + 4.0), until - 2.0):
        kind = rng.choice(("kill", "kill all", "stop"))
        soak.books.kinds[kind] += 1
        pids = await soak.rank_pids()
        fault = soak.books.begin_fault()
        for pid in pids if kind == "kill all" else [rng.choice(pids)]:
            with contextlib.suppress(ProcessLookupError):  # the death of the first has ended the others
                os.kill(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        await _recovered(soak, fault, pids)
        least = 8.0


async def _recovered(soak: Soak, fault: Fault, pids: list[int]) -> None:
    """Other ranks, counted as one restart more, and ready."""
    soak.books.restarts += 1
    end = time.monotonic() + RECOVERY_SECONDS + soak.grace
    while total(await soak.metrics(), "nxd_engine_restarts_total") < soak.books.restarts or not await soak.ready():
        if time.monotonic() > end:
            raise Violation(f"not ready within {RECOVERY_SECONDS:g} s of a fault of the ranks")
        await asyncio.sleep(0.2)
    if set(pids) & set(await soak.rank_pids()):
        raise Violation(f"ranks of {pids} are left after a restart")
    fault.ended = time.monotonic()


async def _pause(seconds: float, until: float) -> bool:
    """False when the end comes first."""
    await asyncio.sleep(max(0.0, min(seconds, until - time.monotonic())))
    return time.monotonic() < until


async def operate(soak: Soak, rng: random.Random, until: float) -> None:
    seeds = [random.Random(rng.random()) for _ in range(3)]
    await all_of(
        *(work(soak, seed, until) for work, seed in zip((swapper, adapter_keeper, breaker), seeds, strict=True))
    )
