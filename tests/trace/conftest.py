"""Toy artifacts: one that is written once a module and copies of it to change, and one of each degree to load."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.trace import toy


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return toy.build(tmp_path_factory.mktemp("original") / "artifact")


@pytest.fixture
def artifact(original, tmp_path) -> Path:
    """A copy."""
    return Path(shutil.copytree(original, tmp_path / "artifact"))


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory) -> dict[int, Path]:
    """By degree; nobody changes them."""
    root = tmp_path_factory.mktemp("models")
    return {degree: toy.build(root / f"tp{degree}", degree=degree) for degree in (1, 2, 4)}
