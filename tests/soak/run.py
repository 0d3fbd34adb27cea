"""One soak from the trace to the end of the server."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

from tests.soak import traffic_and_faults as traffic
from tests.soak.questions import MAX_LEN, Question, Told, question
from tests.soak.state import BODY_BYTES, CALL_TIMEOUT, QUEUE, RANKS, REQUEST_TIMEOUT, SLOTS, Soak
from tests.soak.traffic_and_faults import ADAPTERS, ADMIN_KEY, CHECKPOINTS, RECOVERY_SECONDS
from tests.support import tiny_models
from tests.support.adapter_files import write_adapter
from tests.support.http.http_artifacts import ONE_LAYER, trace_tiny
from tests.support.http.http_servers import ServerProcess, wait_for
from tests.support.processes import gone

ROUND_SECONDS, REPORT_SECONDS, END_SECONDS = 60.0, 10.0, 30.0
GUESSES = 3
MIB = 2**20
MEMORY = {"the server": 16, "a rank": 12}
"""Resident memory may grow by 5 % and so many MiB more, compared with the end of the first round."""
MORE = {"descriptors": 6, "threads": 4, "names under /dev/shm": 0}


def soak(minutes: float, seed: int, clients: int, grace: float) -> int:
    """Run it; 0, or 1 with the first violation on standard output."""
    print(f"soak: seed {seed}, {minutes:g} minutes, {clients} clients", flush=True)
    with tempfile.TemporaryDirectory(prefix="nxd-soak-") as folder:
        copies = 1 + seed // 2 % 2
        server = serve(make_artifact(Path(folder)), speculate=GUESSES * (seed % 2), copies=copies)
        try:
            run = Run(server.wait_ready(), seed, clients, grace, copies)
            run.main(minutes * 60)
        except BaseException as error:
            tell_end(server)
            if not isinstance(error, Exception):
                raise
            print(f"\nVIOLATION by seed {seed}: {type(error).__name__}: {error}", flush=True)
            return 1
        finally:
            server.kill()
    print(f"soak: seed {seed} held for {minutes:g} minutes: {run.summary()}", flush=True)
    return 0


def make_artifact(root: Path) -> Path:
    """Two ranks, eight slots, speculation and adapters, and beside it what the operators load."""
    shapes = {"batch_sizes": [1, SLOTS], "prompt_buckets": [16, 64], "max_len": MAX_LEN, "speculate": GUESSES}
    artifact = trace_tiny("llama", "generate", root, **shapes, lora_slots=len(ADAPTERS) - 1, lora_rank=4)
    tiny_models.write_tiny("llama", root / CHECKPOINTS[1], seed=1, **ONE_LAYER)
    for number, name in enumerate(ADAPTERS):
        write_adapter(root / "adapters" / name, root / CHECKPOINTS[0], rank=4, seed=number)
    return artifact


def serve(artifact: Path, speculate: int, copies: int) -> ServerProcess:
    settings = {
        "replicas": copies,
        "port": 0, "admin_key": ADMIN_KEY, "weights_root": artifact.parent, "speculate": speculate,
        "max_queued_requests": QUEUE, "max_body_bytes": BODY_BYTES, "request_timeout": REQUEST_TIMEOUT,
        "call_timeout": CALL_TIMEOUT, "keep_alive_interval": 1.0, "recovery_timeout": 45.0, "max_restarts": 10000,
        "drain_timeout": END_SECONDS / 2,
    }  # fmt: skip
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    command = [sys.executable, "-m", "nxd_infer", "serve", str(artifact), *options, "--no-access-log"]
    return ServerProcess(command, {"PYTHONFAULTHANDLER": "1"})


def tell_end(server: ServerProcess) -> None:
    """Where the threads are, here and in the server, and what that wrote last."""
    faulthandler.dump_traceback()
    print(f"the server's status is {server.process.poll()}")
    before = len(server.lines)
    with contextlib.suppress(AssertionError):  # it does not end: killed
        server.stop(signal.SIGABRT, END_SECONDS)  # faulthandler writes the stacks
    print("\n".join(server.lines[max(0, before - 60) :]), flush=True)


def sample(pid: int) -> tuple[dict[str, int], set[str]]:
    """What the system says of a process, and the names under /dev/shm that it has mapped; OSError or KeyError
    without one. Pages of files come and go as the system likes, and are left out."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    memory = sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024 // MIB
    mapped = {line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    shared = {name for name in mapped if name.startswith("/dev/shm/")}
    sizes = (memory, len(os.listdir(f"/proc/{pid}/fd")), int(fields["Threads"]), len(shared))
    return dict(zip(("MiB of memory", *MORE), sizes, strict=True)), shared


class Run:
    def __init__(self, server: ServerProcess, seed: int, clients: int, grace: float, copies: int):
        self._begun = time.monotonic()
        self._server, self._clients = server, clients
        self._rng = random.Random(seed)
        self._soak = Soak(server.port, grace, copies)
        self._threads = ThreadPoolExecutor(clients + 20)
        self._over = threading.Event()
        self._pids: set[int] = {server.process.pid}
        self._shared: set[str] = set()
        self._first: dict[str, dict[str, int]] = {}
        """Samples after the first round."""

    def main(self, seconds: float) -> None:
        """Everything while the server lives, and its end."""
        self._all_of(None, lambda: self._work(seconds), self._watch)
        self._end()

    def _all_of(self, seconds: float | None, *works: Callable[[], Any]) -> None:
        """Until all have ended, or one has failed."""
        futures = [self._threads.submit(work) for work in works]
        done, left = wait(futures, seconds, FIRST_EXCEPTION)
        for one in done:
            one.result()
        assert not left, "a client did not come to its end"

    def _work(self, seconds: float) -> None:
        try:
            wait_for(self._soak.whole, RECOVERY_SECONDS, "a copy is not ready")
            self._soak.books.seen.clear()
            self._soak.books.base = self._soak.metrics()
            self._learn(count=round(min(100.0, 15 + seconds / 3)))
            print(f"{len(self._soak.questions)} questions, each asked alone of both checkpoints", flush=True)
            self._calm()  # while every answer was seen whole, so that the counters are known exactly
            self._first = {}
            left, length = seconds, min(ROUND_SECONDS, seconds / 3)
            while left > 0:
                self._round(min(left, length))
                left -= length
                self._calm()
        finally:
            self._over.set()

    def _learn(self, count: int) -> None:
        """Ask every question alone, of both checkpoints; then again of the first, of weights that came back."""
        soak = self._soak
        models = sorted(self._rng.choice(("", "", *ADAPTERS)) for _ in range(count))
        soak.questions = [question(self._rng, model=model or None) for model in models]
        for turn in (0, 1, 0):
            if turn != soak.checkpoints[soak.version]:
                traffic.swap(soak)
            for place, asked in enumerate(soak.questions):
                if (model := asked.body.get("model")) and model not in soak.adapters:
                    if len(soak.adapters) == len(ADAPTERS) - 1:
                        traffic.unload(soak, next(iter(soak.adapters)))
                    traffic.load(soak, model)
                said = self._alone(asked)
                again = soak.known.setdefault((place, turn), said).same(said)
                assert again, f"weights that came back answer {asked.body} with {said}"

    def _alone(self, asked: Question) -> Told:
        for _ in range(10):
            answer = self._soak.ask("POST", asked.path, asked.bytes())
            assert answer.status_code in (200, 504), f"{asked.body} alone gave {answer}"  # 504 on a busy machine
            if said := self._soak.judge(None, asked, answer, self._soak.version):
                return said
        raise AssertionError(f"{asked.body} is not answered")

    def _round(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        everyone = [traffic.swapper, traffic.adapter_keeper, traffic.breaker, *[traffic.client] * self._clients]
        seeds = [random.Random(self._rng.random()) for _ in everyone]
        works = [partial(do, self._soak, seed, until) for do, seed in zip(everyone, seeds, strict=True)]
        self._all_of(seconds + 150, *works)

    def _calm(self) -> None:
        """Nobody asks: everything is free, the counters agree, and nothing has grown since the first round."""
        end = time.monotonic() + 15 + self._soak.grace
        while wrong := self._wrong():
            assert time.monotonic() < end, f"the last request is long over: {wrong}"
            time.sleep(0.3)

    def _wrong(self) -> str:
        copies = self._soak.copies
        if wrong := self._soak.books.disagreement(self._soak.metrics(), SLOTS * copies, self._soak.version, copies):
            return wrong
        try:
            server, *ranks = self._samples()
        except (OSError, KeyError) as error:
            return f"the server or a rank is gone: {error}"
        if len(ranks) != RANKS * copies:
            return f"there are {len(ranks)} ranks"
        found = {"the server": server, "a rank": max(ranks, key=lambda one: one["MiB of memory"])}
        self._first = self._first or found
        wrong = []
        for who, now in found.items():
            before = self._first[who]
            most = {name: before[name] + more for name, more in MORE.items()}
            most["MiB of memory"] = int(before["MiB of memory"] * 1.05) + MEMORY[who]
            wrong += [f"{who} has {now[of]} {of}, {before[of]} before" for of in now if now[of] > most[of]]
        return "; ".join(wrong)

    def _samples(self) -> list[dict[str, int]]:
        """Of the server and its ranks."""
        ranks = self._soak.rank_pids()
        self._pids.update(ranks)
        found = [sample(pid) for pid in (self._server.process.pid, *ranks)]
        self._shared.update(*(shared for _, shared in found))
        return [sizes for sizes, _ in found]

    def _watch(self) -> None:
        """The server says that it lives, and every ten seconds so do we."""
        next_line = time.monotonic()
        while not self._over.wait(0.5):
            self._soak.allow(self._soak.ask("GET", "/livez"), "/livez", 200)
            if time.monotonic() >= next_line:
                next_line += REPORT_SECONDS
                with contextlib.suppress(OSError, KeyError):  # a rank that has just been killed
                    sizes = ", ".join(" ".join(f"{n} {of}" for of, n in one.items()) for one in self._samples())
                    print(f"{time.monotonic() - self._begun:>4.0f} s  {self.summary()}; {sizes}", flush=True)

    def summary(self) -> str:
        books = self._soak.books
        counted = sorted([*books.kinds.items(), *books.generated.items()], key=str)
        kinds = " ".join(f"{name} {count}" for name, count in counted)
        refusals = " ".join(f"{status}: {books.seen[status]}" for status in (429, 503, 504))
        return f"{kinds}; {refusals}; weights {self._soak.version}"

    def _end(self) -> None:
        """SIGTERM while some requests run: they are answered, or told that it is the end; nothing is left of it."""
        with self._soak.books.fault():  # from now on 503 is right
            last = [
                self._threads.submit(traffic.put, self._soak, place, asked, place % 2 == 0)
                for place, asked in enumerate(self._soak.questions[:6])
            ]
            time.sleep(0.3)
            assert self._server.stop(signal.SIGTERM, END_SECONDS) == 0
            for one in last:
                one.result()
        left = [pid for pid in self._pids if not gone(pid, 10 + self._soak.grace)]
        left += [name for name in self._shared if Path(name).exists()]
        assert not left, f"processes or shared memory are left after the end: {left}"
        bad = [line for line in self._server.lines if "Traceback" in line]
        assert not bad, f"the server's log has {len(bad)} tracebacks"
