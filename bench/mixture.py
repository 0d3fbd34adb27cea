"""Measure decoding of a mixture of experts (1.02 B parameters, 0.31 B of them active) against llama.cpp, interleaved;
and the bytes that a step reads, by its time and the bandwidth around it, against those of the active weights."""

from __future__ import annotations

import dataclasses
from typing import Any

from bench import report
from bench.decode import NEW_TOKENS, PROMPT
from bench.model import bench_model, bytes_per_step, prompts
from bench.options import Options
from bench.peers.driver import Peer
from bench.peers.known import field_of, ours
from bench.stats import Turn, Verdict, bandwidth_of, held_ratios, record_of, summary, values

BATCHES = (1, 4)
PEER = "llama_cpp"
PEER_LIMITS = (1.0, 1.1)
READ_LIMITS = (1.2, 1.1)


def run(options: Options) -> None:
    name = "tiny-mixture" if options.model == "tiny" else "mixture"
    peers = tuple(peer for peer in options.peers if peer == PEER)
    options = dataclasses.replace(options, model=name, degrees=(1,), peers=peers)
    model = bench_model(options)
    new_tokens = 40 if options.quick else NEW_TOKENS
    rates: dict[int, dict[str, list[Turn]]] = {}
    firsts: dict[tuple[int, int], dict[str, list[int]]] = {}
    with field_of(options, (BATCHES, (PROMPT,))) as field:
        for batch in BATCHES:

            def measure(peer: Peer, number: int, batch: int = batch) -> float:
                found = peer.run(prompts(model, batch, PROMPT, number), new_tokens)
                firsts.setdefault((batch, number), {})[peer.name] = [row[0] for row in found.tokens]
                return found.rate

            def warm(peer: Peer, batch: int = batch) -> object:
                return peer.run(prompts(model, batch, PROMPT, -1), 4)

            rates[batch] = field.rounds(measure, options.rounds, warm)
        versions = {peer: one.version for peer, one in field.peers.items()}
    mine, active = ours(1), bytes_per_step(model)
    used = [turn for turn in rates[1][mine] if turn.held] or rates[1][mine]
    read = summary([turn.bandwidth / turn.value / active for turn in used])
    verdicts = [
        Verdict(
            "bytes read per token over those of active weights", read, *READ_LIMITS, better="lower", note=_share(used)
        )
    ]
    for batch, found in rates.items():
        if PEER in found:
            ratios, note = held_ratios(found[mine], found[PEER])
            verdicts.append(
                Verdict(f"decode against llama.cpp, batch {batch}", summary(ratios), *PEER_LIMITS, note=note)
            )
    pairs = [(row[mine], row[PEER]) for row in firsts.values() if len(row) == 2]
    same = [one == other for ones, others in pairs for one, other in zip(ones, others, strict=True)]
    figures: dict[str, Any] = {
        "turns": record_of(rates),
        "active_bytes": active,
        "versions": versions,
        "same_first_token": sum(same) / max(1, len(same)),
    }
    rows = [(peer, *(summary(values(rates[batch])[peer]).text() for batch in BATCHES)) for peer in rates[1]]
    rows.append(("read bandwidth, GB/s", *(bandwidth_of(rates[batch]).text(1e-9) for batch in BATCHES)))
    columns = ("tokens/s, median (range)", *(f"batch {batch}" for batch in BATCHES))
    title = f"A mixture after prompts of {PROMPT}; the first token is the same in {figures['same_first_token']:.0%}"
    report.write(
        *("mixture", title, columns, rows, figures),
        verdicts=verdicts,
        skipped=field.skipped,
        settings=options.settings(),
    )


def _share(turns: list[Turn]) -> str:
    return f"{sum(turn.held for turn in turns)} of {len(turns)} turns held"
