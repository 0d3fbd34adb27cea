"""Measure prefill: tokens per second until a prompt's first token, this project and its peers, interleaved."""

from __future__ import annotations

from bench import report
from bench.model import bench_model, prompts
from bench.options import Options
from bench.peers.driver import Peer
from bench.peers.known import HUGGING_FACE, fastest, field_of
from bench.stats import Turn, Verdict, bandwidth_of, held_ratios, record_of, summary, values

LENGTHS = (128, 512)
JUDGED = 512
HF_LIMITS = (1.4, 1.8)


def run(options: Options) -> None:
    model = bench_model(options)
    turns: dict[int, dict[str, list[Turn]]] = {}
    with field_of(options) as field:
        for length in LENGTHS:

            def measure(peer: Peer, number: int, length: int = length) -> float:
                return length / peer.run(prompts(model, 1, length, number), 1).first

            turns[length] = field.rounds(measure, options.rounds, lambda peer, measure=measure: measure(peer, -1))
        versions = {name: peer.version for name, peer in field.peers.items()}
        mine = field.mine()
    rates = {length: values(found) for length, found in turns.items()}
    rows = [(name, *(summary(rates[length][name]).text(digits=0) for length in LENGTHS)) for name in versions]
    rows.append(("read bandwidth, GB/s", *(bandwidth_of(turns[length]).text(1e-9) for length in LENGTHS)))
    best, other = fastest(mine, rates[JUDGED]), fastest(HUGGING_FACE, rates[JUDGED])
    verdicts = []
    if best and other:
        measured, rounds = held_ratios(turns[JUDGED][best], turns[JUDGED][other])
        row = f"prefill of {JUDGED} against Hugging Face eager"
        verdicts.append(Verdict(row, summary(measured), *HF_LIMITS, note=f"{best} against {other}, {rounds}"))
    figures = {
        "rates": {str(length): found for length, found in rates.items()},
        "turns": record_of(turns),
        "versions": versions,
    }
    columns = ("tokens/s, median (range)", *(f"prompt of {length}" for length in LENGTHS))
    report.write(
        *("prefill", "Prefill, one prompt", columns, rows, figures),
        verdicts=verdicts,
        skipped=field.skipped,
        settings=options.settings(),
    )
