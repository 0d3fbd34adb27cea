"""Interpreters are started in one place, which keeps them from importing what lies where they are started."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_there_is_one_way_to_start_python():
    """`command.py` knows how; the doctor only prints the path, and Lightning's launcher repeats its
    own command line."""
    ways = r"\bsys\.executable\b|\bget_context\(|(?<!psutil\.)\bProcess\(|\bProcessPoolExecutor\b|\bmp\.spawn\b"
    files = [file for folder in ("nxd_infer", "server", "models") for file in (ROOT / folder).rglob("*.py")]
    found = {file.name for file in files if re.search(ways, file.read_text())}
    assert found == {"command.py", "doctor.py", "launcher.py"}
