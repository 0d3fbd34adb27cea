"""A toy artifact that is written once per module, and copies of it to change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import toy_artifacts as toy


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return toy.build(tmp_path_factory.mktemp("original") / "artifact")


@pytest.fixture
def artifact(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "artifact"))
