"""Toy artifacts to load, one of each degree, which no test changes; the model that a module has started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import toy_artifacts as toy


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory) -> dict[int, Path]:
    """By degree."""
    root = tmp_path_factory.mktemp("models")
    return {degree: toy.build(root / f"tp{degree}", degree=degree) for degree in (1, 2, 4)}


@pytest.fixture
def model(started):
    """The module's ``started``, with states as traced; ranks that the test before has ended are started again."""
    if not all(rank.alive for rank in started.health()):
        started.restart()
    started.reset_states()
    return started
