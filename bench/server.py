"""Measure the server: start to ready, memory, streaming clients against the engine in process, stalls."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.artifacts import artifact
from bench.client import Stream, checked, load, stream
from bench.model import bench_model, prompts
from bench.options import Options, home
from bench.peers.known import field_of, ours
from bench.process_groups import ROOT, Group, environment, memory_of
from bench.stats import Verdict, interleaved, ratios, summary
from bench.stream import read_bandwidth
from nxd_infer.cli.load.served import ready
from nxd_infer.util.options import defaults
from nxd_infer.util.ports import free_port
from nxd_server.settings import ServerSettings

CLIENTS = (1, 4, 16)
MOST = CLIENTS[-1]
PROMPT, NEW_TOKENS = 128, 128
LATE = 15
"""Prompts that arrive while a stream runs."""
ALONE, TOGETHER = 32, 32
"""Tokens of the running stream before the others arrive, and tokens of each of the others."""
READY_SECONDS = 120.0
CONSTRAINED = {"structured_outputs": {"regex": r"([a-zA-Z]+[ ,.]){1000,}"}}
"""Every token is chosen among those that a grammar allows, and none ends the text."""
STALL = defaults(ServerSettings)["stall_ratio"]
"""The engine in process uses chunked prefill like the server."""


class Server(Group):
    """``nxd-infer serve`` in a process group; ``seconds`` is the time from start to ready.

    It finds no compiler, because its PATH is empty. ``root``: the checkout of the server. ``within``: a command that
    takes the server's as further arguments.
    """

    def __init__(self, directory: Path, root: Path = ROOT, arguments: Sequence[str] = (), within: Sequence[str] = ()):
        self.port = free_port()
        command = [*within, sys.executable, "-m", "nxd_infer.cli.main", "serve", str(directory)]
        command += ["--port", str(self.port), *arguments]
        begin = time.perf_counter()
        env = {**environment(root), "PATH": "/nonexistent"}
        super().__init__(command, home() / "logs" / f"server-{self.port}.log", env=env, cwd=root)
        while not ready(self.port):
            if not self.alive() or time.perf_counter() - begin > READY_SECONDS:
                text = self.tail()
                self.kill()
                raise SystemExit(f"the server did not become ready within {READY_SECONDS:.0f} s:\n{text}")
            time.sleep(0.01)
        self.seconds = time.perf_counter() - begin

    def stop(self) -> None:
        """Stop the server; raises SystemExit unless it exits by itself with status 0."""
        status = self.end()
        if status != 0:
            raise SystemExit(f"the server ended with status {status}:\n{self.tail()}")


def run(options: Options) -> None:
    tp = options.degrees[0]
    path, model = artifact(options, tp), bench_model(options)
    starts, memory_ready, memory_loaded = _starts(options, path)
    bandwidth = [read_bandwidth() for _ in range(options.rounds)]
    with (
        field_of(Options(options.quick, (), (tp,), options.repetitions, options.model), stall_ratio=STALL) as field,
        Server(path) as server,
    ):
        engine = field.peers[ours(tp)]
        new_tokens = 40 if options.quick else NEW_TOKENS

        kept: list[bool] = []

        def hold(work: Callable[[], Any]) -> Any:
            found, held = field.placement.held(work)
            kept.append(held)
            return found

        def serve(number: int, clients: int, **fields: Any) -> Any:
            with server.awake():
                return load(server.port, prompts(model, clients, PROMPT, number), new_tokens, **fields)

        def pace(**fields: Any) -> float:
            """Every prompt is cached after the first time: what is measured are decoding steps."""
            return hold(lambda: summary([one.seconds_per_token for one in serve(-1, MOST, **fields).streams]).median)

        def in_process(number: int, clients: int) -> float:
            times = engine.run(prompts(model, clients, PROMPT, number), new_tokens, timeout=300).times
            return clients * new_tokens / max(row[-1] for row in times)

        server.pause()
        levels: dict[int, dict[str, Any]] = {}
        for clients in CLIENTS:
            work: dict[str, Any] = {
                "server": lambda number, clients=clients: hold(lambda: serve(number, clients)),
                "engine": lambda number, clients=clients: hold(lambda: in_process(number, clients)),
            }
            work["server"](-1)
            levels[clients] = interleaved(work, options.rounds)
        pace(**CONSTRAINED)
        paces = interleaved({"free": lambda _: pace(), "constrained": lambda _: pace(**CONSTRAINED)}, options.rounds)
        server.resume()
        stalls = [_stall(server.port, model, number) for number in range(options.rounds)]
        server.stop()
    figures = {
        "tp": tp,
        "start_seconds": starts,
        "memory_ready": memory_ready,
        "memory_loaded": memory_loaded,
        "bandwidth": bandwidth,
        "held": kept,
        "clients": {str(clients): _level(found) for clients, found in levels.items()},
        "stalls": stalls,
        "paces": paces,
    }
    _report(options, figures)


def _starts(options: Options, path: Path) -> tuple[list[float], list[int], list[int]]:
    """Measure starts alone on the machine: no other process maps the weights, so the server owns all their memory."""
    seconds, idle, loaded = [], [], []
    model = bench_model(options)
    for number in range(min(3, options.rounds)):
        with Server(path) as server:
            seconds.append(server.seconds)
            idle.append(memory_of(server.pid))
            load(server.port, prompts(model, 16, PROMPT, number), 16)
            loaded.append(memory_of(server.pid))
            server.stop()
    return seconds, idle, loaded


def _level(found: dict[str, list[Any]]) -> dict[str, Any]:
    streams: list[Stream] = [one for round_ in found["server"] for one in round_.streams]
    return {
        "server": [round_.rate for round_ in found["server"]],
        "engine": found["engine"],
        "client_seconds": [round_.client_seconds for round_ in found["server"]],
        "first_token": [one.times[0] - one.sent for one in streams],
        "gaps": sorted(gap for one in streams for gap in one.gaps),
    }


def _stall(port: int, model: Path, number: int) -> dict[str, float]:
    """Return the longest gap of a running stream from the arrival of others until all have their first token."""
    first, *others = prompts(model, 1 + LATE, PROMPT, 1000 + number)

    async def scene() -> list[Stream]:
        running = Stream(0.0)
        task = asyncio.create_task(stream(port, first, ALONE + 8 * LATE + TOGETHER, running))
        while len(running.times) < ALONE and not task.done():
            await asyncio.sleep(0.001)
        late = await asyncio.gather(*(stream(port, prompt, TOGETHER) for prompt in others))
        return [await task, *late]

    streams = checked(asyncio.run(asyncio.wait_for(scene(), 300.0)), 0.0).streams
    running, late = streams[0], streams[1:]
    arrival, begun = min(one.sent for one in late), max(one.times[0] for one in late)
    gaps = list(zip(running.times[1:], running.gaps, strict=True))
    alone = summary([gap for moment, gap in gaps if moment <= arrival]).median
    longest = max(gap for moment, gap in gaps if moment > arrival and moment - gap < begun)
    after = [gap for moment, gap in gaps if moment > begun] or [alone]
    return {"longest": longest, "step_alone": alone, "step_together": summary(after).median}


def _report(options: Options, figures: dict[str, Any]) -> None:
    rows = [
        ("start to ready, s", summary(figures["start_seconds"]).text(digits=2)),
        ("memory (PSS) when ready, MiB", summary(figures["memory_ready"]).text(2**-20, 0)),
        ("memory (PSS) after 16 clients, MiB", summary(figures["memory_loaded"]).text(2**-20, 0)),
    ]
    for clients, found in figures["clients"].items():
        gaps, firsts = found["gaps"], found["first_token"]
        rows += [
            (f"{clients} clients, tokens/s", summary(found["server"]).text()),
            (f"{clients} at once in process, tokens/s", summary(found["engine"]).text()),
            (f"{clients} clients, first token, ms", summary(firsts).text(1e3, 0)),
            (f"{clients} clients, between tokens, ms: median, 99 %, longest", _tail(gaps)),
            (f"{clients} clients, processor time of the client, s", summary(found["client_seconds"]).text(digits=2)),
        ]
    steps = {name: [one[name] for one in figures["stalls"]] for name in ("longest", "step_alone", "step_together")}
    rows += [
        (f"longest stall while {LATE} prompts of {PROMPT} arrive, ms", summary(steps["longest"]).text(1e3)),
        ("step of that stream alone, ms", summary(steps["step_alone"]).text(1e3)),
        ("step of that stream with all others, ms", summary(steps["step_together"]).text(1e3)),
        (f"{MOST} clients, a token, ms", summary(figures["paces"]["free"]).text(1e3)),
        (f"{MOST} clients, a token that a grammar allows, ms", summary(figures["paces"]["constrained"]).text(1e3)),
        ("read bandwidth, GB/s", summary(figures["bandwidth"]).text(1e-9)),
    ]
    report.write(
        *("server", f"Server at tp {figures['tp']}", ("what", "median (range)"), rows, figures),
        verdicts=_verdicts(figures, steps),
        settings=options.settings(),
    )


def _tail(gaps: Sequence[float]) -> str:
    places = (len(gaps) // 2, len(gaps) * 99 // 100, len(gaps) - 1)
    return " / ".join(f"{gaps[place] * 1e3:.0f}" for place in places)


def _verdicts(figures: dict[str, Any], steps: dict[str, list[float]]) -> list[Verdict]:
    most, paces = figures["clients"][str(MOST)], figures["paces"]
    gib = [value / 2**30 for value in figures["memory_loaded"]]
    alone = ratios(steps["longest"], steps["step_alone"])
    together = summary(ratios(steps["longest"], steps["step_together"])).text()
    against = summary(ratios(most["server"], most["engine"]))
    held = f"{sum(figures['held'])} of {len(figures['held'])} turns of all numbers of clients held"
    return [
        Verdict("server, 16 clients, against the engine", against, 0.90, 0.95, note=held),
        Verdict(
            "constrained tokens over others, 16 clients",
            *(summary(ratios(paces["constrained"], paces["free"])), 1.10, 1.05, "lower"),
        ),
        Verdict("server, start to ready", summary(figures["start_seconds"]), 4.0, 2.0, "lower", "s"),
        Verdict("server memory (PSS)", summary(gib), 1.4, 1.1, "lower", "GiB", "after 16 clients"),
        Verdict(
            f"longest stall while {LATE} prompts arrive",
            summary(alone),
            *(4.0, 2.0, "lower", "steps"),
            note=f"steps of the stream alone; {together} steps of all 16",
        ),
    ]
