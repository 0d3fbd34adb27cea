"""Measure decoding speed of this project and its peers on the same prompts, interleaved; and step time by context."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from bench import report
from bench.model import bench_model, bytes_per_step, cache_bytes_per_token, prompts
from bench.options import Options
from bench.peers.driver import Peer
from bench.peers.known import HUGGING_FACE, Field, fastest, field_of, ours
from bench.stats import (
    Turn,
    Verdict,
    bandwidth_of,
    held_ratios,
    interleaved,
    record_of,
    summary,
    values,
)
from nxd_infer.cli.console import table

BATCHES = (1, 4, 16)
PROMPT, NEW_TOKENS = 128, 64
CONTEXTS = (128, 512, 1024, 2048, 4096)
STEPS = 16
SHARES = 3
"""Readings of the share per round."""
HF_LIMITS = {1: (2.5, 3.5), 4: (3.5, 5.0), 16: (4.0, 6.0)}
PEER_LIMITS = {1: (1.0, 1.1), 4: (1.3, 2.0), 16: (1.2, 1.6)}
TP_LIMITS = (0.95, 1.05)
BANDWIDTH_LIMITS = (0.80, 0.92)

Rates = dict[int, dict[str, list[Turn]]]
"""Batch, name -> tokens per second, one per round."""
Firsts = dict[str, dict[tuple[int, int], list[int]]]
"""Name -> batch and round -> first tokens of the rows; a repeated turn uses the same prompts."""
Contexts = dict[str, dict[str, dict[str, list[Turn]]]]
"""Name, batch, context -> seconds of a step, one per round."""


def run(options: Options) -> None:
    model = bench_model(options)
    new_tokens = 40 if options.quick else NEW_TOKENS
    rates: Rates = {}
    firsts: Firsts = {}
    with field_of(options) as field:
        for batch in BATCHES:

            def measure(peer: Peer, number: int, batch: int = batch) -> float:
                found = peer.run(prompts(model, batch, PROMPT, number), new_tokens)
                firsts.setdefault(peer.name, {})[batch, number] = [row[0] for row in found.tokens]
                return found.rate

            def warm(peer: Peer, batch: int = batch) -> object:
                return peer.run(prompts(model, batch, PROMPT, -1), 4)

            rates[batch] = field.rounds(measure, options.rounds, warm)
        best = fastest(field.mine(), values(rates[1])) or ours(1)
        shares = [
            field.turn(lambda number=number: measure(field.peers[best], number, 1))
            for number in range(SHARES * options.rounds)
        ]
        contexts = _contexts(options, field)
        peers, mine = dict(field.peers), field.mine()
    rates = {batch: {name: found[name] for name in peers} for batch, found in rates.items()}
    agreement = {name: _agreement(firsts, name) for name in peers}
    figures = {
        "rates": {str(batch): values(found) for batch, found in rates.items()},
        "turns": record_of(rates),
        "contexts": {
            name: {batch: values(cells) for batch, cells in batches.items()} for name, batches in contexts.items()
        },
        "versions": {name: peer.version for name, peer in peers.items()},
        "load_seconds": {name: peer.start_seconds for name, peer in peers.items()},
        "agreement": agreement,
        "shares": [asdict(turn) for turn in shares],
        "bytes_per_step": bytes_per_step(model),
        "cache_bytes_per_token": cache_bytes_per_token(model),
    }
    rows = [
        (name, *(summary(values(rates[batch])[name]).text() for batch in BATCHES), f"{agreement[name]:.0%}")
        for name in peers
    ]
    rows.append(("read bandwidth, GB/s", *(bandwidth_of(rates[batch]).text(1e-9) for batch in BATCHES), ""))
    columns = ("tokens/s, median (range)", *(f"batch {batch}" for batch in BATCHES), "same first token")
    _print_contexts(contexts)
    report.write(
        *("decode", f"Decoding after prompts of {PROMPT}", columns, rows, figures),
        verdicts=[
            *_share(model, best, shares),
            *_against("Hugging Face eager as it is by default", rates, mine, HUGGING_FACE[:1], HF_LIMITS),
            *_against("Hugging Face eager, the faster cache", rates, mine, HUGGING_FACE, HF_LIMITS),
            *_against("the best peer", rates, mine, [name for name in peers if name not in mine], PEER_LIMITS),
            *_degrees(rates),
            *_growth(model, contexts),
        ],
        skipped=field.skipped,
        settings=options.settings(),
    )


def _agreement(firsts: Firsts, name: str) -> float:
    """Return how often a peer's first token equals Hugging Face's (or ours), to check that all do the same work."""
    reference, mine = firsts.get("hf") or next(iter(firsts.values())), firsts.get(name, {})
    both = [pair for key in mine.keys() & reference.keys() for pair in zip(mine[key], reference[key], strict=True)]
    return sum(one == other for one, other in both) / max(1, len(both))


def _contexts(options: Options, field: Field) -> Contexts:
    """Measure seconds of a step, by degree, batch and context: each round takes the median of its steps."""
    batches, wanted = ((4,), (128, 1024)) if options.quick else (BATCHES, CONTEXTS)
    cells = [(name, batch, context) for batch in batches for context in wanted for name in field.mine()]

    def measure(name: str, batch: int, context: int) -> float:
        seconds = field.peers[name].ask("steps", 300.0, batch=batch, context=context, count=STEPS)["seconds"]
        return summary(seconds[2:]).median

    names = [str(cell) for cell in cells]
    work = {
        key: lambda _, cell=cell: field.turn(lambda: measure(*cell)) for key, cell in zip(names, cells, strict=True)
    }
    found = interleaved(work, options.rounds)
    out: Contexts = {}
    for key, (name, batch, context) in zip(names, cells, strict=True):
        out.setdefault(name, {}).setdefault(str(batch), {})[str(context)] = found[key]
    return out


def _share(model: Path, name: str, shares: list[Turn]) -> list[Verdict]:
    """Return the share over the turns that kept their placement, or over all if none did."""
    held = [turn for turn in shares if turn.held]
    used = held or shares
    pace = summary([turn.bandwidth for turn in used]).text(1e-9)
    note = (
        f"{name}; weights only, {bytes_per_step(model) / 1e6:.1f} MB per step; "
        f"{len(held)} of {len(shares)} turns held, with memory at {pace} GB/s"
    )
    measured = summary([turn.value * bytes_per_step(model) / turn.bandwidth for turn in used])
    return [Verdict("decode, batch 1: share of the bandwidth", measured, *BANDWIDTH_LIMITS, note=note)]


def _against(
    title: str, rates: Rates, mine: Iterable[str], others: Iterable[str], limits: dict[int, tuple[float, float]]
) -> list[Verdict]:
    """Compare our faster degree with the fastest of ``others``, batch by batch."""
    verdicts = []
    for batch, found in rates.items():
        best, other = fastest(mine, values(found)), fastest(others, values(found))
        if best and other:
            measured, rounds = held_ratios(found[best], found[other])
            row = f"decode against {title}, batch {batch}"
            verdicts.append(Verdict(row, summary(measured), *limits[batch], note=f"{best} against {other}, {rounds}"))
    return verdicts


def _degrees(rates: Rates) -> list[Verdict]:
    verdicts = []
    for batch, found in rates.items():
        if batch in (1, 4) and ours(1) in found and ours(2) in found:
            measured, rounds = held_ratios(found[ours(2)], found[ours(1)])
            verdicts.append(Verdict(f"tp 2 against tp 1, batch {batch}", summary(measured), *TP_LIMITS, note=rounds))
    return verdicts


def _growth(model: Path, contexts: Contexts) -> list[Verdict]:
    """Return the growth of step time from the shortest to the longest context, relative to the growth of the bytes that
    a step reads: weights and live keys and values."""
    verdicts = []
    for name, batches in contexts.items():
        low, high = min(map(int, batches["4"])), max(map(int, batches["4"]))
        read = {context: bytes_per_step(model) + 4 * context * cache_bytes_per_token(model) for context in (low, high)}
        growth = read[high] / read[low]
        found, rounds = held_ratios(batches["4"][str(high)], batches["4"][str(low)])
        row = f"context {high} over {low}, batch 4, {name}: time over bytes"
        note = f"bytes read grow {growth:.2f} times, {rounds}"
        measured = summary([value / growth for value in found])
        verdicts.append(Verdict(row, measured, 1.0, 1.0, better="lower", note=note))
    return verdicts


def _print_contexts(contexts: Contexts) -> None:
    wanted = list(next(iter(next(iter(contexts.values())).values())))
    rows = [
        (f"{name}, batch {batch}", *(summary(values(cells)[context]).text(1e3) for context in wanted))
        for name, batches in contexts.items()
        for batch, cells in batches.items()
    ]
    table("Milliseconds of a decoding step by context", ("", *wanted), rows)
