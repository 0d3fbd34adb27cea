"""How a benchmark prints: a table on the terminal, and the same figures as JSON under ``bench/results/``."""

from __future__ import annotations

import json
import platform
import statistics
from pathlib import Path
from typing import Any

from nxd_infer.cli.console import console, table

RESULTS = Path(__file__).parent / "results"


def median(values: list[float]) -> float:
    return statistics.median(values)


def write(
    name: str, title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]], figures: dict[str, Any]
) -> None:
    """Print ``rows`` and keep ``figures``."""
    table(title, columns, rows)
    RESULTS.mkdir(exist_ok=True)
    record = {"benchmark": name, "machine": platform.processor() or platform.machine(), "figures": figures}
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"figures: {path.relative_to(RESULTS.parent.parent)}", style="dim")
