"""One soak from the trace to the end of the server."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.soak.clients import client
from tests.soak.operators import ADAPTERS, CHECKPOINTS, load, operate, swap, unload
from tests.soak.process_samples import MIB, RANK_MIB, SERVER_MIB, Sample, growth, sample
from tests.soak.questions import MAX_LEN, Question, Told, question, told
from tests.soak.state import ADMIN, BODY_BYTES, CALL_TIMEOUT, QUEUE, REQUEST_TIMEOUT, SLOTS, Soak
from tests.soak.wire import Violation, all_of, end, waiting
from tests.support import tiny_models
from tests.support.adapter_files import write_adapter
from tests.support.http.http_artifacts import ONE_LAYER, trace_tiny
from tests.support.http.http_servers import ServerProcess
from tests.support.processes import gone

ROUND_SECONDS, REPORT_SECONDS, END_SECONDS = 60.0, 10.0, 30.0
GUESSES = 3


def soak(minutes: float, seed: int, clients: int, grace: float) -> int:
    """Run it; 0, or 1 with the first violation on standard output."""
    print(f"soak: seed {seed}, {minutes:g} minutes, {clients} clients", flush=True)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nxd-soak-") as folder:
        artifact = make_artifact(Path(folder))
        print(f"traced in {time.monotonic() - begun:.0f} s", flush=True)
        with serving(artifact, speculate=GUESSES * (seed % 2)) as server:
            run = Run(server, seed, clients, grace)
            try:
                asyncio.run(run.main(minutes * 60))
                run.after_the_end()
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
    shapes = {"batch_sizes": [1, SLOTS], "prompt_buckets": [16, 64], "max_len": MAX_LEN, "speculate": GUESSES}
    artifact = trace_tiny("llama", "generate", root, **shapes, lora_slots=len(ADAPTERS) - 1, lora_rank=4)
    model = root / CHECKPOINTS[0]
    tiny_models.write_tiny("llama", root / CHECKPOINTS[1], seed=1, **ONE_LAYER)
    for number, name in enumerate(ADAPTERS):
        write_adapter(root / "adapters" / name, model, rank=4, seed=number)
    return artifact


@contextlib.contextmanager
def serving(artifact: Path, speculate: int) -> Iterator[ServerProcess]:
    """The real server, ready."""
    settings = {
        "port": 0, "admin_key": ADMIN.split()[-1], "weights_root": artifact.parent, "speculate": speculate,
        "max_queued_requests": QUEUE, "max_body_bytes": BODY_BYTES, "request_timeout": REQUEST_TIMEOUT,
        "call_timeout": CALL_TIMEOUT, "keep_alive_interval": 1.0, "recovery_timeout": 45.0, "max_restarts": 10000,
        "access_log": False, "drain_timeout": END_SECONDS / 2,
    }  # fmt: skip
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    command = [sys.executable, "-m", "nxd_server", str(artifact), *options]
    server = ServerProcess(command, {"PYTHONFAULTHANDLER": "1"})
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
    def __init__(self, server: ServerProcess, seed: int, clients: int, grace: float):
        self.begun = time.monotonic()
        self._server, self._clients = server, clients
        self._rng = random.Random(seed)
        self._soak = Soak(server.port, grace)
        self._pids: set[int] = {server.process.pid}
        self._shared: set[str] = set()
        self._first: tuple[Sample, Sample] | None = None
        """The server and the larger rank after the first round."""

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
        print(f"{len(self._soak.questions)} questions, each asked alone of both checkpoints, {self._age}", flush=True)
        left, length = seconds, min(ROUND_SECONDS, seconds / 3)
        while left > 0:
            await self._round(min(left, length))
            left -= length
            await self._calm()

    @property
    def _age(self) -> str:
        return f"{time.monotonic() - self.begun:.0f} s"

    # --- known answers ----------------------------------------------------------------------------------

    async def _learn(self, count: int) -> None:
        """Ask every question alone, of both checkpoints; then again of the first, of weights that came back."""
        models = sorted((self._rng.choice(("", "", *ADAPTERS)) for _ in range(count)), key=str)
        self._soak.questions = [question(self._rng, model=model or None) for model in models]
        for name in ADAPTERS[:2]:
            await load(self._soak, name)
        for turn in (0, 1, 0):
            if turn != self._soak.checkpoints[self._soak.version]:
                await swap(self._soak)
            for place, asked in enumerate(self._soak.questions):
                if asked.model is not None and asked.model not in self._soak.adapters:
                    await unload(self._soak, next(iter(self._soak.adapters)))
                    await load(self._soak, asked.model)
                said = await self._alone(asked)
                if not self._soak.known.setdefault((place, turn), said).same(said):
                    raise Violation(f"weights that came back answer {asked.body} with {said}")

    async def _alone(self, asked: Question) -> Told:
        for _ in range(10):
            answer = await self._soak.ask("POST", asked.path, asked.bytes())
            if answer.status != 504:  # on a busy machine
                break
            self._soak.books.incomplete(asked)
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
        server, samples = sample(self._server.process.pid), [sample(pid) for pid in ranks]
        there = [one for one in samples if one is not None]
        if server is None or len(there) != 2:
            return [f"the server or a rank of {ranks} is gone"]
        rank = max(there, key=lambda one: one.memory)
        first, _ = self._first, self._note(server, *there)
        if first is None:
            self._first = server, rank
            return []
        return growth("the server", first[0], server, SERVER_MIB) + growth("a rank", first[1], rank, RANK_MIB)

    def _note(self, *samples: Sample) -> None:
        for one in samples:
            self._shared |= one.shared

    async def _watch(self) -> None:
        """A line every ten seconds; Violation when the server ends by itself, or does not say that it lives."""
        next_line = time.monotonic() + REPORT_SECONDS
        while True:
            await asyncio.sleep(0.5)
            self._soak.allow(await self._soak.ask("GET", "/livez"), "/livez", 200)
            if (status := self._server.process.poll()) is not None:
                raise Violation(f"the server ended with status {status}")
            if time.monotonic() >= next_line:
                next_line += REPORT_SECONDS
                ranks = await self._soak.rank_pids()
                self._pids.update(ranks)
                found = [one for pid in (self._server.process.pid, *ranks) if (one := sample(pid)) is not None]
                self._note(*found)
                sizes = [f"{one.memory // MIB} MiB {one.descriptors} fds {one.threads} threads" for one in found]
                print(f"{self._age:>6}  {self.summary()}; {', '.join(sizes)}", flush=True)

    def summary(self) -> str:
        books = self._soak.books
        kinds = " ".join(f"{name} {count}" for name, count in sorted(books.kinds.items()))
        refusals = " ".join(f"{status}: {books.status(status)}" for status in (429, 503, 504))
        return f"{kinds}; {books.choices} choices, {books.tokens} tokens; {refusals}; weights {self._soak.version}"

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
        except subprocess.TimeoutExpired:
            raise Violation(f"the server did not end within {END_SECONDS:g} s of SIGTERM") from None
        if status != 0:
            raise Violation(f"the server ended with status {status} after SIGTERM")

    async def _last(self, place: int) -> None:
        asked, version = self._soak.questions[place], self._soak.version
        answer = await self._soak.ask("POST", asked.path, asked.bytes(place % 2 == 0))
        self._soak.judge(place, asked, answer, version)

    def after_the_end(self) -> None:
        """Nothing is left of it."""
        end = time.monotonic() + 10 + self._soak.grace
        while left := [pid for pid in self._pids if not gone(pid)]:
            if time.monotonic() > end:
                raise Violation(f"processes {left} are left after the end")
            time.sleep(0.1)
        if names := [name for name in self._shared if Path(name).exists()]:
            raise Violation(f"shared memory is left after the end: {names}")
        if bad := [line for line in self._server.lines if "Traceback" in line]:
            raise Violation(f"the server's log has {len(bad)} tracebacks, the first: {bad[0]}")
