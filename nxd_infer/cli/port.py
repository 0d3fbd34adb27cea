"""``nxd-infer port``: the old packages' names in a program, and what becomes of each, as text or JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.text import Text

from nxd_infer.cli.console import console
from nxd_infer.compat.port import STATUSES, STOPS, Report, Row, examine

MOST_LINES = 4
"""Lines that are listed of a name in a file."""


def run(paths: Sequence[Path], as_json: bool) -> int:
    """Print the report on ``paths``; return 1 if something stops one of the programs, else 0."""
    report = examine(paths)
    if as_json:
        rows = [{**dataclasses.asdict(row), "stops": row.stops} for row in report.rows]
        print(json.dumps({"files": report.files, "counts": report.counts, "names": rows}, ensure_ascii=False))
    else:
        _print(report)
    return int(report.stops)


def _print(report: Report) -> None:
    for file, rows in groupby(report.rows, key=lambda row: row.file):
        listed = [(_lines(row), row) for row in rows]
        console.print(file, style="bold", markup=False, soft_wrap=True)
        place = max(len(lines) for lines, _ in listed)
        status = max(len(row.status) for _, row in listed)
        name = max(len(row.name) for _, row in listed)
        for lines, row in listed:
            text = Text(f"  {lines:<{place}}  ")
            text.append(f"{row.status:<{status}}", _style(row))
            text.append(f"  {row.name:<{name}}  {_said(row)}".rstrip())
            console.print(text, soft_wrap=True)
    counts = [f"{count} {STATUSES[status]}" for status, count in report.counts.items()]
    what = f"{sum(report.counts.values())} names in {report.files} file{'' if report.files == 1 else 's'}"
    console.print(f"{what}: {'; '.join(counts)}" if counts else f"{what}: nothing to do", markup=False, soft_wrap=True)


def _lines(row: Row) -> str:
    more = len(row.lines) - MOST_LINES
    return ", ".join(row.lines[:MOST_LINES]) + (f", {more} more" if more > 0 else "")


def _said(row: Row) -> str:
    caught = "the program expects that" if row.guarded else ""
    return "; ".join(part for part in (row.text, caught) if part)


def _style(row: Row) -> str:
    if row.status in STOPS:
        return "yellow" if row.guarded else "red"
    return {"works": "green", "moved": "green"}.get(row.status, "yellow")
