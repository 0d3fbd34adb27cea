"""Lint, format and types are part of the tests: a change that breaks them does not land."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import HAS_INDUCTOR

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.check
def test_ruff_finds_nothing():
    assert run(str(BIN / "ruff"), "check", ".") == ""


@pytest.mark.check
def test_ruff_would_reformat_nothing():
    assert run(str(BIN / "ruff"), "format", "--check", ".") == ""


@pytest.mark.skipif(not HAS_INDUCTOR, reason="types are checked against the annotations of the newest torch")
def test_types_are_consistent():
    assert run(str(BIN / "basedpyright")) == ""
