"""Reports of benchmarks: tables on the terminal, and the same figures as JSON under ``bench/results/``."""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from bench.stats import Verdict
from nxd_infer.cli.console import console, table
from nxd_infer.util.memory import total_memory

RESULTS = Path(__file__).parent / "results"


class SummaryRecord(BaseModel):
    model_config = ConfigDict(extra="forbid")

    median: float
    low: float
    high: float
    count: int


class VerdictRecord(BaseModel):
    model_config = ConfigDict(extra="forbid")

    row: str
    measured: SummaryRecord
    must: float
    aim: float
    better: Literal["higher", "lower"]
    unit: str
    note: str
    result: Literal["aim", "must", "short"]
    certain: bool


class Record(BaseModel):
    """One file of ``bench/results/``."""

    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = 1
    benchmark: str
    finished: str
    """UTC, ISO 8601."""
    machine: dict[str, str | int]
    settings: dict[str, Any]
    figures: dict[str, Any]
    """Every reading, so that a table or a plot can be recreated."""
    verdicts: list[VerdictRecord]
    skipped: dict[str, str]
    """Participants that were left out, and why."""


def machine() -> dict[str, str | int]:
    """Return a description of the machine."""
    flags = next((line for line in _cpuinfo() if line.startswith("flags")), "").split()
    return {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": total_memory(),
        "features": " ".join(flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": f"{os.getloadavg()[0]:.2f}",
    }


def _processor() -> str:
    """Return for example ``"AMD EPYC, family 25, model 17"``: virtual machines see one name for all."""
    first = {}
    for line in _cpuinfo():
        key, _, value = (part.strip() for part in line.partition(":"))
        first.setdefault(key, value)
    if "model name" not in first:
        return platform.machine()
    return f"{first['model name']}, family {first.get('cpu family', '?')}, model {first.get('model', '?')}"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def write(
    name: str,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    figures: dict[str, Any],
    *,
    verdicts: Sequence[Verdict] = (),
    skipped: dict[str, str] | None = None,
    settings: dict[str, Any] | None = None,
) -> Record:
    """Print ``rows``, skipped peers and the verdicts, save ``figures``, and return the record."""
    table(title, columns, rows)
    for peer, reason in (skipped or {}).items():
        console.print(f"{peer} did not take part: {reason}", style="dim", markup=False)
    show(verdicts)
    record = Record(
        benchmark=name,
        finished=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        machine=machine(),
        settings=settings or {},
        figures=figures,
        verdicts=[_record(verdict) for verdict in verdicts],
        skipped=skipped or {},
    )
    RESULTS.mkdir(exist_ok=True)
    path = place(name, bool(record.settings.get("quick")))
    path.write_text(record.model_dump_json(indent=1) + "\n")
    on = f"{record.machine['cpu']}, {record.machine['cores']} cores"
    console.print(f"on {on}; figures: {path}", style="dim", markup=False, soft_wrap=True)
    return record


def place(name: str, quick: bool = False) -> Path:
    """Return the path of a record; a quick run never overwrites a real record."""
    return RESULTS / f"{name}{'-quick' if quick else ''}.json"


def read(name: str, quick: bool = False) -> Record | None:
    """Return the last record of a benchmark, or None."""
    path = place(name, quick)
    return Record.model_validate_json(path.read_text()) if path.is_file() else None


def show(verdicts: Sequence[Verdict]) -> None:
    """Print the rows of the project's table that were measured."""
    if not verdicts:
        return
    words = {"aim": "aim reached", "must": "reached", "short": "SHORT"}
    rows = []
    for verdict in verdicts:
        sign = "" if verdict.better == "higher" else "at most "
        measured = verdict.measured.text(digits=2)
        if verdict.unit != "x":
            measured += f" {verdict.unit}"
        word = words[verdict.result] + ("" if verdict.certain else ", rounds differ")
        rows.append((verdict.row, f"{sign}{verdict.must:g}", f"{sign}{verdict.aim:g}", measured, word, verdict.note))
    table("Against the project's table", ("row", "must", "aim", "measured", "verdict", "note"), rows)


def _record(verdict: Verdict) -> VerdictRecord:
    return VerdictRecord(**dataclasses.asdict(verdict), result=verdict.result, certain=verdict.certain)
