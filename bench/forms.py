"""Measure decoding and prompts by the form of the weights (bfloat16, eight and four bits) and by size, against peers
with weights of as many bits, interleaved.

For each size and form all participants start, answer in turns, and end: no two forms are in memory together, except
this project's bfloat16, which is beside its own others where both fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import report
from bench.artifacts import nxd_infer, sources_digest
from bench.decode import BATCHES, NEW_TOKENS, PROMPT
from bench.model import TINY, bytes_per_step, prompts, stamped
from bench.options import THREADS, Options, home
from bench.peers.driver import Peer
from bench.peers.known import KNOWN, Field, Known, fastest, field_with
from bench.sizes import SIZES, sized_model
from bench.stats import Turn, Turns, Verdict, bandwidth_of, held_ratios, record_of, summary, values
from nxd_infer.cli.console import console

FORMS: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "int8": (("--quantize", "int8"), {"llama_cpp": ("Q8_0",), "openvino": ("int8",)}),
    "int4": (("--quantize", "int4"), {"llama_cpp": ("Q4_0", "Q4_K_M"), "openvino": ("int4",)}),
    "bfloat16": ((), {"llama_cpp": ("F16",), "openvino": ("fp16",)}),
}
"""By form: this project's options of a trace, and each peer's forms."""
JUDGED = {"int8": "llama_cpp Q8_0", "int4": "llama_cpp Q4_0"}
"""By form, the peer that decoding is compared with."""
DECODE_LIMITS = {1: (1.0, 1.2), 4: (1.3, 2.0), 16: (1.5, 2.0)}
PROMPT_LIMITS = (1.0, 1.2)
BANDWIDTH_LIMITS = (0.88, 0.92)
LONG = 512
BESIDE = 8 << 30
"""Most bytes of bfloat16 weights that are held beside other forms."""
START_SECONDS = 1800.0
"""A peer rounds eight billion weights before it starts for the first time."""

Found = dict[int, dict[str, list[Turn]]]
"""Batch -> name -> tokens per second; under PREFILL, prompt tokens per second."""
PREFILL = 0


def run(options: Options) -> None:
    folder = options.folder or home() / "sizes"
    sizes = {"tiny": TINY} if options.model == "tiny" else {name: SIZES[name] for name in options.sizes}
    rows, verdicts, figures = [], [], {}
    skipped: dict[str, str] = {}
    for size, shape in sizes.items():
        model = sized_model(folder, size, shape)
        for form in FORMS:
            if form == "bfloat16" and _bytes(model) > BESIDE:
                skipped[f"{size} {form}"] = "does not fit beside its own file"
                continue
            found, field = measure(options, folder, model, form)
            skipped |= {f"{size} {name}": why for name, why in field.skipped.items()}
            figures[f"{size} {form}"] = record_of(found)
            rows += [
                (size, name, *(summary(values(found[key])[name]).text() for key in (*BATCHES, PREFILL)))
                for name in found[BATCHES[0]]
            ]
            bandwidth = (bandwidth_of(found[key]).text(1e-9) for key in (*BATCHES, PREFILL))
            rows.append((size, "read bandwidth, GB/s", *bandwidth))
            verdicts += judged(size, form, model, found)
    columns = ("", "tokens/s, median (range)", *(f"batch {batch}" for batch in BATCHES), f"prompt of {LONG}")
    report.write(
        *("forms", "Forms of weights", columns, rows, figures),
        verdicts=verdicts,
        skipped=skipped,
        settings=options.settings(),
    )


def measure(options: Options, folder: Path, model: Path, form: str) -> tuple[Found, Field]:
    """Measure one form of one model."""
    further, theirs = FORMS[form]
    mine = {f"ours {form}": further}
    if form != "bfloat16" and _bytes(model) <= BESIDE:
        mine["ours bfloat16"] = ()
    wanted: dict[str, tuple[Known, Mapping[str, Any]]] = {
        name: (Known("ours"), {"model": str(traced(folder, model, option)), "threads": THREADS})
        for name, option in mine.items()
    }
    for peer in options.peers:
        known = dataclasses.replace(KNOWN[peer], start_timeout=START_SECONDS)
        for one in theirs.get(peer, ()):
            wanted[f"{peer} {one}"] = known, {"model": str(model), "threads": THREADS, "form": one}
    new_tokens = 40 if options.quick else NEW_TOKENS
    found: Found = {}
    with field_with(wanted) as field:
        for batch in BATCHES:

            def decode(peer: Peer, number: int, batch: int = batch) -> float:
                return peer.run(prompts(model, batch, PROMPT, number), new_tokens, 600.0).rate

            found[batch] = field.rounds(decode, options.rounds, lambda peer, decode=decode: decode(peer, -1))
            show(f"{model.name} {form}, batch {batch}, tokens/s", found[batch])

        def prefill(peer: Peer, number: int) -> float:
            return LONG / peer.run(prompts(model, 1, LONG, number), 1, 600.0).first

        found[PREFILL] = field.rounds(prefill, options.rounds, lambda peer: prefill(peer, -1))
        show(f"{model.name} {form}, prompt of {LONG}, tokens/s", found[PREFILL])
        kept = field.peers
        return {key: {name: turns for name, turns in one.items() if name in kept} for key, one in found.items()}, field


def show(what: str, turns: Mapping[str, list[Turn]]) -> None:
    """Print what was just measured: a whole run takes an hour."""
    console.print(f"{what}: " + ", ".join(f"{name} {summary(found).text()}" for name, found in values(turns).items()))


def traced(folder: Path, model: Path, further: tuple[str, ...]) -> Path:
    """Return ``model`` traced for one rank, with ``further`` options."""
    arguments: list[Any] = ["trace", model, "--batch-sizes", ",".join(map(str, BATCHES)), "--dtype", "bfloat16"]
    arguments += ["--prompt-buckets", f"{PROMPT},{LONG}", "--max-len", 2048, *further]
    key = f"{sources_digest()} {model.with_name(model.name + '.stamp').read_text()} {arguments}"
    name = "-".join((model.name, "tp1", *further)).replace("--", "")
    return stamped(folder / "artifacts" / name, key, lambda path: nxd_infer(*arguments, "--out", path))


def judged(size: str, form: str, model: Path, found: Found) -> list[Verdict]:
    """Return the verdicts on one form of one size."""
    mine, verdicts = f"ours {form}", []

    def against(row: str, turns: Turns, other: str | None, limits: tuple[float, float]) -> None:
        if other is not None and other in turns:
            measured, note = held_ratios(turns[mine], turns[other])
            verdicts.append(Verdict(f"{size}, {form}: {row} over {other}", summary(measured), *limits, note=note))

    if form == "bfloat16":
        turns = found[1][mine]
        used = [turn for turn in turns if turn.held] or turns
        share = summary([turn.value * bytes_per_step(model) / turn.bandwidth for turn in used])
        verdicts.append(Verdict(f"{size}, batch 1: share of the bandwidth", share, *BANDWIDTH_LIMITS))
        return verdicts
    for batch, limits in DECODE_LIMITS.items():
        against(f"batch {batch}", found[batch], JUDGED[form], limits)
    others = [name for name in found[PREFILL] if not name.startswith("ours")]
    best = fastest(others, values(found[PREFILL]))
    against(f"prompt of {LONG}", found[PREFILL], best if form == "int4" else "ours bfloat16", PROMPT_LIMITS)
    return verdicts


def _bytes(model: Path) -> int:
    return (model / "model.safetensors").stat().st_size
