"""Prefill: tokens a second until one prompt's first token, this project and its peers, interleaved."""

from __future__ import annotations

from bench import report
from bench.model import bench_model, prompts
from bench.options import Options
from bench.peers.driver import Peer
from bench.peers.known import HUGGING_FACE, fastest, field_of
from bench.stats import Pace, Verdict, ratios_at_one_pace, readings, summary

LENGTHS = (128, 512)
JUDGED = 512
HF_LIMITS = (1.4, 1.8)


def run(options: Options) -> None:
    model = bench_model(options)
    rates: dict[int, dict[str, list[float]]] = {}
    paces: dict[int, dict[str, list[Pace]]] = {}
    with field_of(options) as field:
        for length in LENGTHS:

            def measure(peer: Peer, number: int, length: int = length) -> float:
                return length / peer.run(prompts(model, 1, length, number), 1).first

            rates[length], paces[length] = field.rounds(
                measure, options.rounds, lambda peer, measure=measure: measure(peer, -1)
            )
        versions = {name: peer.version for name, peer in field.peers.items()}
        mine = field.mine()
    rows = [(name, *(summary(rates[length][name]).text(digits=0) for length in LENGTHS)) for name in versions]
    rows.append(("read bandwidth, GB/s", *(summary(readings(paces[length])).text(1e-9) for length in LENGTHS)))
    best, other = fastest(mine, rates[JUDGED]), fastest(HUGGING_FACE, rates[JUDGED])
    verdicts = []
    if best and other:
        values, rounds = ratios_at_one_pace(
            rates[JUDGED][best], rates[JUDGED][other], paces[JUDGED][best], paces[JUDGED][other]
        )
        row = f"prefill of {JUDGED} against Hugging Face eager"
        verdicts.append(Verdict(row, summary(values), *HF_LIMITS, note=f"{best} against {other}, {rounds}"))
    figures = {
        "rates": {str(length): found for length, found in rates.items()},
        "paces": {str(length): found for length, found in paces.items()},
        "versions": versions,
    }
    columns = ("tokens/s, median (range)", *(f"prompt of {length}" for length in LENGTHS))
    report.write(
        *("prefill", "Prefill, one prompt", columns, rows, figures),
        verdicts=verdicts,
        skipped=field.skipped,
        settings=options.settings(),
    )
