"""A test that is skipped for a reason that nobody listed fails the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CASES = {
    "listed": ("kubectl is not installed", "def test_it(): pytest.skip({reason!r})", True),
    "of a test": ("it was red", "def test_it(): pytest.skip({reason!r})", False),
    "of a module": ("it was red", "pytest.skip({reason!r}, allow_module_level=True)", False),
    "of a package": ("could not import 'no_such'", "pytest.importorskip('no_such')", False),
    "of real devices": ("it asks the stand-in", "@pytest.mark.skipif(1, reason={reason!r})\ndef test_it(): ...", False),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("processes", [[], ["-n", "1"]])
def test_a_reason_that_is_not_listed_fails_the_run(tmp_path: Path, name: str, processes: list[str]) -> None:
    reason, text, listed = CASES[name]
    body = f"import pytest\ndef test_passes(): ...\n{text.format(reason=reason)}\n"
    (tmp_path / "test_file.py").write_text(body)
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.skips", *processes, str(tmp_path)]
    there = {key: value for key, value in os.environ.items() if key != "NXD_INFER_REAL_NEURON"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=there)
    assert (done.returncode == 0) == listed, done.stdout
    assert (f"\n{reason}" in done.stdout) != listed
