"""``pytest --write-durations`` writes ``tests/durations.json``: the longest files begin first, so that pytest-xdist,
which gives whole files away, leaves no process without work. A missing or wrong figure costs balance alone."""

from __future__ import annotations

import collections
import json
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "durations.json"
LEAST = 2.0
"""Seconds; what takes less is not written."""
_SECONDS: dict[str, float] = json.loads(FILE.read_text())


def seconds(nodeid: str) -> float:
    return _SECONDS.get(nodeid.partition("::")[0], 0.0)


class Writer:
    """Of the files that ran, the new figures; all others keep theirs, unless the file is gone."""

    def __init__(self, config: pytest.Config):
        self._root = config.rootpath
        self._runs = not hasattr(config, "workerinput")
        self._took: collections.Counter[str] = collections.Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._took[report.nodeid.partition("::")[0]] += report.duration  # pyright: ignore[reportArgumentType]

    def pytest_sessionfinish(self) -> None:
        if self._runs:
            known = {**_SECONDS, **self._took}
            kept = {file: round(took, 1) for file, took in known.items() if took >= LEAST}
            there = {file: took for file, took in sorted(kept.items()) if (self._root / file).is_file()}
            FILE.write_text(json.dumps(there, indent=1) + "\n")
