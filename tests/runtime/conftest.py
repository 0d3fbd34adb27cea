"""Toy artifacts to load: one of each degree, which no test changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import toy_artifacts as toy


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory) -> dict[int, Path]:
    """By degree."""
    root = tmp_path_factory.mktemp("models")
    return {degree: toy.build(root / f"tp{degree}", degree=degree) for degree in (1, 2, 4)}
