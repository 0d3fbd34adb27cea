"""``make install`` says what it is doing while it takes minutes, and nothing once everything is there."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]


def make_install(venv: Path) -> str:
    """``make install`` into an environment whose pip only says what it was asked for."""
    done = subprocess.run(
        ["make", "--no-print-directory", "install", f"VENV={venv}", "TORCH=torch==9.9"],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    return done.stdout


def test_install_names_its_steps_and_lets_pip_show_its_progress(tmp_path):
    (tmp_path / "bin").mkdir()
    for name, text in (("python", "exit 1"), ("pip", 'echo "pip $@"')):  # `import torch` fails: it is not there yet
        script = tmp_path / "bin" / name
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
    lines = make_install(tmp_path).splitlines()
    assert f"installing into {tmp_path}" in lines[0]
    assert [line[:6] for line in lines[1::2]] == ["1 of 3", "2 of 3", "3 of 3"]
    pip = lines[2::2]
    assert len(pip) == 3 and all(line.startswith("pip install") for line in pip)
    assert not any(word in line for line in pip for word in ("--quiet", "-q ", "--progress-bar"))
    assert "torch==9.9" in pip[0] and "torch" not in pip[1]
    again = make_install(tmp_path)
    assert "pip" not in again and "of 3" not in again
