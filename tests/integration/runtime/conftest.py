"""Toy artifacts to load, one of each degree, which no test changes; models of them that others have started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nxd_infer.runtime.model import TensorParallelModel
from tests.support import toy_artifacts as toy
from tests.support.runtime.rank_processes import started as start
from tests.support.shared import shared


@pytest.fixture(scope="session")
def artifacts() -> dict[int, Path]:
    """By degree."""
    return {
        degree: shared(f"toy/tp{degree}", lambda folder, degree=degree: toy.build(folder, degree=degree))
        for degree in (1, 2, 4)
    }


@pytest.fixture(scope="session")
def path(artifacts) -> Path:
    return artifacts[2]


@pytest.fixture(scope="session")
def started(path) -> Iterator[TensorParallelModel]:
    with start(path) as model:
        yield model


@pytest.fixture
def model(started):
    """``started``, with states as traced; ranks that the test before has ended are started again."""
    if not all(rank.alive for rank in started.health()):
        started.restart()
    started.reset_states()
    return started
