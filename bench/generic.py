"""Serve a Llama by our family and in transformers' own module, and compare their decoding speed, interleaved."""

from __future__ import annotations

import contextlib
from typing import Any

from bench import report
from bench.artifacts import artifact
from bench.client import load
from bench.model import bench_model, prompts
from bench.options import Options
from bench.peers.known import Field
from bench.server import Server
from bench.stats import Turn, Verdict, held_ratios, interleaved, summary, values

BATCHES, PROMPT = (1, 4), 128
SIDES: dict[str, tuple[str, ...]] = {"our family": (), "transformers' module": ("--model-impl", "transformers")}
LIMITS = (0.9, 1.0)


def run(options: Options) -> None:
    model = bench_model(options)
    new_tokens = 40 if options.quick else 128
    rows: dict[str, dict[str, list[Turn]]] = {}
    field = Field({}, {})
    for tp in options.degrees:
        paths = {name: artifact(options, tp, BATCHES, (PROMPT,), further=further) for name, further in SIDES.items()}
        with contextlib.ExitStack() as stack:
            field.placement.look()
            servers = {name: stack.enter_context(Server(path)) for name, path in paths.items()}
            for server in servers.values():
                server.pause()

            def serve(name: str, number: int, batch: int, servers: dict[str, Server] = servers) -> float:
                with servers[name].awake():
                    return load(servers[name].port, prompts(model, batch, PROMPT, number), new_tokens).rate

            for batch in BATCHES:
                for name in SIDES:
                    serve(name, -1, batch)

                def turn(number: int, name: str, batch: int = batch, serve: Any = serve) -> Turn:
                    return field.turn(lambda: serve(name, number, batch))

                rows[f"tp {tp}, {batch} clients"] = interleaved(
                    {name: lambda number, name=name, turn=turn: turn(number, name) for name in SIDES}, options.rounds
                )
    _report(options, rows)


def _report(options: Options, rows: dict[str, dict[str, list[Turn]]]) -> None:
    ours, theirs = SIDES
    table, verdicts = [], []
    for row, found in rows.items():
        ratios, note = held_ratios(found[theirs], found[ours])
        each: dict[str, Any] = values(found)
        table.append((row, *(summary(each[name]).text(digits=2) for name in SIDES)))
        verdicts.append(Verdict(row, summary(ratios), *LIMITS, note=note))
    report.write(
        *("generic", "Tokens/s of a served Llama", ("row", *SIDES), table),
        {row: values(found) for row, found in rows.items()},
        verdicts=verdicts,
        settings=options.settings(),
    )
