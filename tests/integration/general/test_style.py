"""Lint, format and types are part of the tests: a change that breaks them does not land."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.needs import HAS_INDUCTOR

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent


def run(*command: str, seconds: float = 600) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_ruff_finds_nothing():
    assert run(str(BIN / "ruff"), "check", ".") == ""


def test_ruff_would_reformat_nothing():
    assert run(str(BIN / "ruff"), "format", "--check", ".") == ""


CLUMSY = (r"(?<![Tt]here )\bis no (?!longer\b)[a-zA-Z]\w*", r"\b(?:once|twice|one|\d+) a \w+")
"""``not a`` in place of ``is no``, ``per`` in place of ``a``."""


def clumsy(text: str) -> list[str]:
    """What is worded so, also across the lines of a comment or of a text in several parts."""
    joined = re.sub(r"[ \"']*\n\s*(?:#|//|f?r?(?=[\"']))?[ \"']*", " ", text)
    return [found for pattern in CLUMSY for found in re.findall(pattern, joined)]


def test_texts_and_comments_are_plain():
    assert clumsy('"a is no "\n    f"graph"') == ["is no graph"] and clumsy("# once\n    # a step") == ["once a step"]
    assert not clumsy("if there is no graph, it is no longer read once per step")
    folders = ("nxd_infer", "server/nxd_server", "models/nxd_models")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".h", ".cpp")]
    assert len(files) > 300
    assert {str(path.relative_to(ROOT)): found for path in files if (found := clumsy(path.read_text()))} == {}


@pytest.mark.timeout(2400)
@pytest.mark.skipif(not HAS_INDUCTOR, reason="types are checked against the annotations of the newest torch")
def test_types_are_consistent():
    assert run(str(BIN / "basedpyright"), seconds=1800) == ""
