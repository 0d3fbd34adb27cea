"""One soak from the trace to the end of the server."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.attackers import SPIN
from tests.soak import process_samples
from tests.soak.clients import MALFORMED, client, refuse
from tests.soak.operators import ADAPTERS, CHECKPOINTS, load, operate, swap, unload
from tests.soak.questions import MAX_LEN, Question, Told, question, told
from tests.soak.sieges import Sieges
from tests.soak.state import ADMIN, BODY_BYTES, CALL_TIMEOUT, GRACE, QUEUE, REQUEST_TIMEOUT, SLOTS, Soak, pids_of
from tests.soak.tasks import all_of, end, waiting
from tests.soak.wire import Violation
from tests.support import tiny_models
from tests.support.adapter_files import write_adapter
from tests.support.http.http_artifacts import ONE_LAYER, trace_tiny
from tests.support.http.http_servers import ServerProcess
from tests.support.processes import gone

ROUND_SECONDS, REPORT_SECONDS = 60.0, 10.0
END_SECONDS = 30.0
GUESSES = 3
LIVEZ_SECONDS, LOOKS = 0.1, 40
MIB = process_samples.MIB


def soak(minutes: float, seed: int, clients: int, grace: float, sieges: bool = False) -> int:
    """Run it; 0, or 1 with the first violation on standard output."""
    print(f"soak: seed {seed}, {minutes:g} minutes, {clients} clients", flush=True)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nxd-soak-") as folder:
        artifact = make_artifact(Path(folder))
        print(f"traced in {time.monotonic() - begun:.0f} s", flush=True)
        mark = f"NXD_SOAK_RUN={uuid.uuid4().hex}"
        with serving(artifact, mark, speculate=GUESSES * (seed % 2)) as server:
            run = Run(server, seed, clients, grace, sieges)
            try:
                asyncio.run(run.main(minutes * 60))
                run.after_the_end(mark)
            except Violation as violation:
                tell_end(server)
                print(f"\nVIOLATION after {time.monotonic() - run.begun:.1f} s of seed {seed}: {violation}", flush=True)
                return 1
            except SystemExit:
                tell_end(server)
                raise
    print(f"soak: seed {seed} held for {minutes:g} minutes: {run.summary()}", flush=True)
    return 0


def make_artifact(root: Path) -> Path:
    """Two ranks, eight slots, speculation and adapters, and beside it what the operators load."""
    shapes = {"batch_sizes": [1, SLOTS], "prompt_buckets": [16, 64], "max_len": MAX_LEN}
    adapters: dict[str, Any] = {"lora_slots": len(ADAPTERS) - 1, "lora_rank": 4}
    model = {"template": SPIN}
    artifact = trace_tiny("llama", "generate", root, model=model, **shapes, **adapters, speculate=GUESSES)
    tiny_models.write_tiny("llama", root / CHECKPOINTS[1], seed=1, **ONE_LAYER)
    for number, name in enumerate(ADAPTERS):
        write_adapter(root / "adapters" / name, root / CHECKPOINTS[0], rank=4, seed=number)
    return artifact


@contextlib.contextmanager
def serving(artifact: Path, mark: str, speculate: int) -> Iterator[ServerProcess]:
    """The real server, ready; every process of it has ``mark`` in its environment."""
    settings = {
        "port": 0, "admin_key": ADMIN.split()[-1], "weights_root": artifact.parent, "speculate": speculate,
        "max_queued_requests": QUEUE, "max_body_bytes": BODY_BYTES, "request_timeout": REQUEST_TIMEOUT,
        "call_timeout": CALL_TIMEOUT, "keep_alive_interval": 1.0, "recovery_timeout": 45.0, "max_restarts": 10000,
        "access_log": False, "drain_timeout": END_SECONDS / 2,
    }  # fmt: skip
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    environment = {"PYTHONFAULTHANDLER": "1"} | dict([mark.split("=")])
    server = ServerProcess([sys.executable, "-m", "nxd_server", str(artifact), *options], environment)
    try:
        yield server.wait_ready()
    finally:
        if server.process.poll() is None:
            server.kill()


def tell_end(server: ServerProcess) -> None:
    """What the server wrote last, and where its threads are."""
    if (status := server.process.poll()) is not None:
        print(f"the server had ended with status {status}")
    before = len(server.lines)
    with contextlib.suppress(AssertionError):  # it does not end: killed
        server.stop(signal.SIGABRT, END_SECONDS)  # faulthandler writes the stacks
    print("\n".join(server.lines[max(0, before - 60) :]), flush=True)


class Run:
    def __init__(self, server: ServerProcess, seed: int, clients: int, grace: float, besieged: bool):
        self.begun = time.monotonic()
        self._server, self._clients = server, clients
        self._rng = random.Random(seed)
        self._soak = Soak(server.port, grace)
        self._sieges = Sieges(self._soak, server.process.pid, seed)
        self._besieged = besieged
        self._pids: set[int] = {server.process.pid}
        self._shared: set[str] = set()
        self._patience = LIVEZ_SECONDS * max(1.0, grace / GRACE)
        self._alive: list[float] = []
        """Seconds that the last looks at ``/livez`` took."""
        self._mine: process_samples.Sample | None = None
        self._ranks: process_samples.Sample | None = None

    async def main(self, seconds: float) -> None:
        """Everything while the server lives, and its end."""
        work = asyncio.ensure_future(self._work(seconds))
        watch = asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()
            await work
        finally:
            await end(work, watch)
        await self._end()

    async def _work(self, seconds: float) -> None:
        self._soak.books.base = await self._soak.metrics()
        await self._learn(count=round(min(100.0, 15 + seconds / 3)))
        print(
            f"{len(self._soak.questions)} questions, each asked alone of both checkpoints, after {self._age}",
            flush=True,
        )
        for wrong in MALFORMED:
            await refuse(self._soak, *wrong)
        left, length = seconds, min(ROUND_SECONDS, seconds / 3)
        while left > 0:
            await self._round(min(left, length))
            left -= length
            await self._calm()
            if self._besieged:
                await self._sieges.some()
                await self._calm()

    @property
    def _age(self) -> str:
        return f"{time.monotonic() - self.begun:.0f} s"

    # --- known answers ----------------------------------------------------------------------------------

    async def _learn(self, count: int) -> None:
        """Ask every question alone, of both checkpoints; then the first ones again, of weights that came back."""
        rng = self._rng
        models = [rng.choice((None, None, *ADAPTERS)) for _ in range(count)]
        self._soak.questions = [question(rng, model=model) for model in models]
        for name in ADAPTERS[:2]:
            await load(self._soak, name)
        for turn in (0, 1, 0):
            if turn != self._soak.checkpoints[self._soak.version]:
                await swap(self._soak)
            for place, asked in self._by_adapter():
                if asked.model is not None and asked.model not in self._soak.adapters:
                    await unload(self._soak, next(iter(self._soak.adapters)))
                    await load(self._soak, asked.model)
                said = await self._alone(asked)
                if not self._soak.known.setdefault((place, turn), said).same(said):
                    raise Violation(f"weights that came back answer {asked.body} with {said}")

    def _by_adapter(self) -> list[tuple[int, Question]]:
        return sorted(enumerate(self._soak.questions), key=lambda item: item[1].model or "")

    async def _alone(self, asked: Question) -> Told:
        answer = await self._soak.ask("POST", asked.path, asked.bytes())
        for _ in range(10):
            if answer.status != 504:  # on a busy machine
                break
            self._soak.books.incomplete(asked)
            answer = await self._soak.ask("POST", asked.path, asked.bytes())
        self._soak.allow(answer, asked.body, 200)
        said = told(asked, answer)
        if not isinstance(said, Told) or said.version != self._soak.version:
            raise Violation(f"{asked.body} alone gave {answer}")
        self._soak.books.complete(said)
        return said

    # --- traffic ----------------------------------------------------------------------------------------

    async def _round(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        seeds = [random.Random(self._rng.random()) for _ in range(self._clients + 1)]
        everyone = [client(self._soak, seed, until) for seed in seeds[1:]]
        traffic = asyncio.ensure_future(all_of(operate(self._soak, seeds[0], until), *everyone))
        try:
            await asyncio.wait({traffic}, timeout=seconds + 150)
            if not traffic.done():
                raise Violation(f"a client did not come to its end; {waiting()}")
            await traffic
        finally:
            await end(traffic)

    async def _calm(self) -> None:
        """Nobody asks: everything is free, the counters agree, and nothing has grown since the first round."""
        limit = 15 + self._soak.grace
        end = time.monotonic() + limit
        while True:
            metrics = await self._soak.metrics()
            wrong = self._soak.books.disagreement(metrics, SLOTS, self._soak.version)
            wrong = wrong or "; ".join(self._grown(await self._soak.rank_pids()))
            if not wrong:
                return
            if time.monotonic() > end:
                raise Violation(f"{limit:g} s after the last request: {wrong}")
            await asyncio.sleep(0.3)

    def _grown(self, ranks: list[int]) -> list[str]:
        mine = process_samples.sample(self._server.process.pid)
        samples = [sample for pid in ranks if (sample := process_samples.sample(pid)) is not None]
        if mine is None or len(samples) != 2:
            return [f"the server or a rank of {ranks} is gone"]
        most = max(samples, key=lambda sample: sample.memory)
        if self._mine is None or self._ranks is None:
            self._mine, self._ranks = mine, most
            return []
        return process_samples.growth(
            "the server", self._mine, mine, process_samples.SERVER_MIB
        ) + process_samples.growth("a rank", self._ranks, most, process_samples.RANK_MIB)

    async def _watch(self) -> None:
        """A line every ten seconds; Violation when the server ends by itself, or is late to say that it lives."""
        next_line = time.monotonic() + REPORT_SECONDS
        while True:
            await asyncio.sleep(0.5)
            await self._look_alive()
            if (status := self._server.process.poll()) is not None:
                raise Violation(f"the server ended with status {status}")
            if time.monotonic() >= next_line:
                next_line += REPORT_SECONDS
                health = await self._soak.health()
                ranks = pids_of(health)
                self._pids.update(ranks)
                inside = f"{health.get('running')} run, {health.get('waiting')} wait"
                print(f"{self._age:>6}  {self.summary()}; {inside}; {self._system(ranks)}", flush=True)

    async def _look_alive(self) -> None:
        """Most of the last looks at ``/livez`` took no longer than they may."""
        answer = await self._soak.ask("GET", "/livez", bound=END_SECONDS)
        self._soak.allow(answer, "/livez", 200)
        self._alive = [*self._alive[1 - LOOKS :], answer.ended - answer.begun]
        if len(self._alive) == LOOKS and (usual := statistics.median(self._alive)) > self._patience:
            raise Violation(f"/livez took {usual:.2f} s, more often than not")

    def _system(self, ranks: list[int]) -> str:
        words = []
        for name, pid in (("server", self._server.process.pid), *((f"rank {n}", pid) for n, pid in enumerate(ranks))):
            if (sample := process_samples.sample(pid)) is not None:
                self._shared |= sample.shared
                words.append(
                    f"{name} {sample.memory // MIB} MiB {sample.descriptors.total()} fds {sample.threads} threads"
                )
        return ", ".join(words)

    def summary(self) -> str:
        books = self._soak.books
        kinds = " ".join(f"{name} {count}" for name, count in sorted(books.kinds.items()))
        refusals = " ".join(f"{status}: {books.status(status)}" for status in (429, 503, 504))
        alive = f"/livez {1000 * max(self._alive, default=0):.0f} ms at most"
        answers = f"{books.choices} choices, {books.tokens} tokens"
        sieges = [self._sieges.summary()] if self._besieged else []
        return "; ".join([kinds, answers, refusals, f"weights {self._soak.version}", alive, *sieges])

    # --- the end ----------------------------------------------------------------------------------------

    async def _end(self) -> None:
        """SIGTERM while some requests run: they are answered, or told that it is the end."""
        self._pids.update(await self._soak.rank_pids())
        self._soak.books.begin_fault()  # from now on 503 is right
        asks = [asyncio.ensure_future(self._last(place)) for place in range(min(6, len(self._soak.questions)))]
        await asyncio.sleep(0.3)
        self._server.process.send_signal(signal.SIGTERM)
        await all_of(*asks)
        try:
            status = await asyncio.to_thread(self._server.process.wait, END_SECONDS)
        except Exception:
            raise Violation(f"the server did not end within {END_SECONDS:g} s of SIGTERM") from None
        if status != 0:
            raise Violation(f"the server ended with status {status} after SIGTERM")

    async def _last(self, place: int) -> None:
        asked, version = self._soak.questions[place], self._soak.version
        answer = await self._soak.ask("POST", asked.path, asked.bytes(place % 2 == 0))
        self._soak.judge(place, asked, answer, version)

    def after_the_end(self, mark: str) -> None:
        """Nothing is left of it."""
        end = time.monotonic() + 10 + self._soak.grace
        while left := [pid for pid in self._pids if not gone(pid)] + process_samples.marked(mark):
            if time.monotonic() > end:
                raise Violation(f"processes {left} are left after the end")
            time.sleep(0.1)
        if names := [name for name in self._shared if Path(name).exists()]:
            raise Violation(f"shared memory is left after the end: {names}")
        if bad := [line for line in self._server.lines if "Traceback" in line]:
            raise Violation(f"the server's log has {len(bad)} tracebacks, the first: {bad[0]}")
