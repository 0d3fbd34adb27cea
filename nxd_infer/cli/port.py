"""``nxd-infer port``: the old packages' names in a program, and what becomes of each, as text or JSON."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.text import Text

from nxd_infer.cli.console import console
from nxd_infer.compat.port import STATUSES, Row, examine

MOST_LINES = 4
"""Lines that are listed of a name in a file."""


def run(paths: Sequence[Path], as_json: bool) -> int:
    """Print what becomes of the names in ``paths``; return 1 if something stops one of the programs, else 0."""
    files, rows = examine(paths)
    seen = Counter(status for _, status in {(row.name, row.status) for row in rows})
    counts = {status: seen[status] for status in STATUSES if seen[status]}
    if as_json:
        names = [{**dataclasses.asdict(row), "stops": row.stops} for row in rows]
        print(json.dumps({"files": files, "counts": counts, "names": names}, ensure_ascii=False))
    else:
        _print(rows)
        what = f"{_count(seen.total(), 'name')} in {_count(files, 'file')}"
        said = ", ".join(f"{status} {count}" for status, count in counts.items())
        console.print(f"{what}: {said or 'nothing to do'}", markup=False, soft_wrap=True)
        if counts:
            legend = "; ".join(f"{status}: {STATUSES[status]}" for status in counts)
            console.print(f"({legend})", style="dim", markup=False, soft_wrap=True)
    return int(any(row.stops for row in rows))


def _print(rows: Sequence[Row]) -> None:
    for file, some in groupby(rows, key=lambda row: row.file):
        console.print(file, style="bold", markup=False, soft_wrap=True)
        cells = [((_lines(row), row.status, row.name), row) for row in some]
        lines, status, name = (max(len(texts[place]) for texts, _ in cells) for place in range(3))
        for texts, row in cells:
            line = Text(f"  {texts[0]:<{lines}}  ")
            good = row.status in ("works", "moved")
            line.append(f"{texts[1]:<{status}}", "green" if good else "red" if row.stops else "yellow")
            console.print(line.append(f"  {texts[2]:<{name}}  {_said(row)}".rstrip()), soft_wrap=True)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _lines(row: Row) -> str:
    more = len(row.lines) - MOST_LINES
    return ", ".join(row.lines[:MOST_LINES]) + (f", {more} more" if more > 0 else "")


def _said(row: Row) -> str:
    return "; ".join(part for part in (row.text, "the program expects that" if row.guarded else "") if part)
