"""Compare two checkouts of this project on the same work, interleaved, to see whether a change cost speed.

Each traces the model, serves it and runs its own side of ``bench.peers``; this one measures both. Every figure is a
ratio of speeds, work per second here over there, so more is better.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench import report
from bench.artifacts import artifact
from bench.client import load
from bench.decode import BATCHES, NEW_TOKENS, PROMPT
from bench.model import bench_model, prompts
from bench.options import THREADS, Options, home
from bench.peers.driver import Peer
from bench.peers.known import OFFLINE, Field
from bench.process_groups import ROOT, environment
from bench.recovery import again_after
from bench.server import CLIENTS, Server
from bench.stats import Turn, Verdict, held_ratios, interleaved, summary, values
from bench.two_ranks import figures_of

LONG_PROMPT = 511
LIMITS = (0.97, 1.0)
START_SECONDS = 120.0
TRAINING = ("tp 2", "tp 2, sequence parallel", "ZeRO-1")
"""Rows of ``bench.train_ranks``."""
TRAINING_ROUNDS = 3
"""In one turn of a checkout."""

Sides = Mapping[str, Path]
"""Name -> checkout."""
Rows = dict[str, dict[str, list[Turn]]]
"""Row -> name -> work per second, one per round."""


def run(options: Options) -> None:
    if options.against is None:
        raise SystemExit(
            "`against` compares with another checkout: pass --against PATH (`git worktree add PATH COMMIT` creates one)"
        )
    sides = {"ours there": options.against.resolve(), "ours here": ROOT}
    model = bench_model(options)
    rows: Rows = {}
    for tp in options.degrees:
        paths = {name: artifact(options, tp, root=root) for name, root in sides.items()}
        rows |= {f"tp {tp}, {row}": found for row, found in _in_process(options, sides, paths, model, tp).items()}
        rows |= {f"tp {tp}, {row}": found for row, found in _servers(options, sides, paths, model, tp).items()}
    if 2 in options.degrees:
        rows |= _training(options, sides)
    _report(options, rows)


def _in_process(options: Options, sides: Sides, paths: Mapping[str, Path], model: Path, tp: int) -> Rows:
    """Measure decoding and prefill with each checkout's engine."""
    rows: Rows = {}
    new_tokens = 40 if options.quick else NEW_TOKENS
    field = Field({}, {})
    try:
        field.placement.look()
        for name, root in sides.items():
            command = [sys.executable, "-c", "from bench.peers import ours as peer; peer.main()"]
            env = {**environment(root), **OFFLINE, "OMP_NUM_THREADS": str(THREADS // tp)}
            peer = Peer(name, command, home() / "logs" / f"{name.replace(' ', '-')}.log", env, root)
            field.peers[name] = peer
            peer.start(START_SECONDS, model=str(paths[name]), threads=THREADS // tp)
        for batch in BATCHES:
            rows[f"decode, batch {batch}"] = field.rounds(
                lambda peer, number, batch=batch: peer.run(prompts(model, batch, PROMPT, number), new_tokens).rate,
                options.rounds,
                lambda peer, batch=batch: peer.run(prompts(model, batch, PROMPT, -1), 4),
            )
        rows[f"prefill of {LONG_PROMPT}"] = field.rounds(
            lambda peer, number: 1 / peer.run(prompts(model, 1, LONG_PROMPT, number), 1).first,
            options.rounds,
            lambda peer: peer.run(prompts(model, 1, LONG_PROMPT, -1), 1),
        )
    finally:
        for peer in field.peers.values():
            peer.close()
    return rows


def _servers(options: Options, sides: Sides, paths: Mapping[str, Path], model: Path, tp: int) -> Rows:
    """Measure each checkout's server, alone on the machine: start, recovery, clients.

    Each round has servers of its own: which steps one chooses follows from the times that it measured first, and two
    starts of one checkout can differ by 15 % with 4 clients.
    """
    rows: Rows = {}
    field = Field({}, {})
    field.placement.look()

    def begin(name: str) -> Server:
        return Server(paths[name], sides[name])

    def start(name: str) -> float:
        with begin(name) as server:
            server.stop()
            return 1 / server.seconds

    def again(name: str, number: int) -> float:
        with begin(name) as server:
            seconds = asyncio.run(again_after(signal.SIGKILL, server, model, number))
            server.stop()
            return 1 / seconds

    rows["server, start to ready"] = _turns(field, sides, options.rounds, lambda name, _: start(name))
    if tp > 1:  # at degree 1 a restart of the only rank equals a start
        rows["server, rank killed to ready again"] = _turns(field, sides, min(3, options.rounds), again)
    new_tokens = 40 if options.quick else NEW_TOKENS

    def serve(name: str, number: int) -> dict[int, float]:
        with begin(name) as server:
            load(server.port, prompts(model, max(CLIENTS), PROMPT, -1), new_tokens)
            rates = {
                clients: load(server.port, prompts(model, clients, PROMPT, number), new_tokens).rate
                for clients in CLIENTS
            }
            server.stop()
        return rates

    rows |= _turns_of_several(field, sides, options.rounds, serve, {n: f"server, {n} clients" for n in CLIENTS})
    return rows


def _training(options: Options, sides: Sides) -> Rows:
    """Measure steps of training: a turn is a whole run of a checkout's own benchmark."""
    field = Field({}, {})
    field.placement.look()
    once = options if options.quick else dataclasses.replace(options, repetitions=TRAINING_ROUNDS)

    def steps(name: str, number: int) -> dict[str, float]:
        seconds = figures_of("bench.train_ranks", once, sides[name])["seconds"]
        return {row: 1 / statistics.median(seconds[row]) for row in TRAINING}

    return _turns_of_several(field, sides, options.rounds, steps, {row: f"train, {row}" for row in TRAINING})


def _turns(field: Field, names: Sides, rounds: int, work: Callable[[str, int], float]) -> dict[str, list[Turn]]:
    each = {name: lambda number, name=name: field.turn(lambda: work(name, number)) for name in names}
    return interleaved(each, rounds)


def _turns_of_several(
    field: Field, names: Sides, rounds: int, work: Callable[[str, int], Mapping[Any, float]], rows: Mapping[Any, str]
) -> Rows:
    """Like :func:`_turns`, of work that measures several rows at once: ``rows`` names the values of each."""
    found: Rows = {row: {name: [] for name in names} for row in rows.values()}
    for number in range(rounds):
        for name in sorted(names, reverse=bool(number % 2)):
            values: dict[Any, float] = {}

            def measure(name: str = name, number: int = number, values: dict[Any, float] = values) -> float:
                values.update(work(name, number))
                return next(iter(values.values()))

            turn = field.turn(measure)
            for key, row in rows.items():
                found[row][name].append(dataclasses.replace(turn, value=values[key]))
    return found


def _report(options: Options, rows: Rows) -> None:
    table, verdicts = [], []
    for row, found in rows.items():
        there, here = (found[name] for name in ("ours there", "ours here"))
        ratios, note = held_ratios(here, there)
        each: dict[str, Any] = values(found)
        table.append((row, *(summary(each[name]).text(digits=2) for name in ("ours there", "ours here"))))
        verdicts.append(Verdict(row, summary(ratios), *LIMITS, note=note))
    report.write(
        *("against", "Work per second, there and here", ("row", "there", "here"), table),
        {row: values(found) for row, found in rows.items()},
        verdicts=verdicts,
        settings={**options.settings(), "against": str(options.against)},
    )
