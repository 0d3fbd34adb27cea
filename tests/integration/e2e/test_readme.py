"""The README tells the truth: every command in it is run, in its order, in one directory."""

from __future__ import annotations

import contextlib
import importlib
import re
import shlex
import subprocess
import sys

import pytest

from nxd_infer.util.ports import free_port
from tests.support.e2e.command import ROOT, here
from tests.support.e2e.serving import serving

README = (ROOT / "README.md").read_text()
# Made shorter, not left out: a test need not train for a minute, nor compile what other tests compile.
SHORTER = {
    "--dir demo": "--dir demo --seconds 2 --tp 1 --small",
    "--tp 2": "--tp 1",
    "--batch-sizes 1,4 --prompt-buckets 32,128 --max-len 256": "--batch-sizes 1 --prompt-buckets 32 --max-len 64",
    "--max-tokens 24": "--max-tokens 8",
}
PORT = "8000"
VENV = re.findall(r"^VENV \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0]


@pytest.mark.smoke
def test_the_make_commands_are_targets():
    targets = re.findall(r"^make ([\w-]+)", README.split("```")[1], re.MULTILINE)
    assert targets == ["demo", "test"]
    subprocess.run(["make", "-n", *targets, "check", "bench", "soak", "lint"], cwd=ROOT, check=True, timeout=600)


@pytest.mark.smoke
def test_the_console_session_runs_as_written(tmp_path, monkeypatch):
    """Commands run in this process, but for the server."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    commands = [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    assert all(any(long in command for command in commands) for long in SHORTER)
    port = free_port()
    with contextlib.ExitStack() as stack:
        for written in commands:
            command = written.replace(PORT, str(port))
            for long, short in SHORTER.items():
                command = command.replace(long, short)
            program, *words = shlex.split(command)
            if program == "source":
                assert words == [f"{VENV}/bin/activate"]
            elif words[0] == "serve":
                stack.enter_context(serving(words, port, tmp_path))
            elif program == "nxd-infer":
                done = here(*words)
                assert done.status == 0, f"{command}\n{done.out}{done.err}"
            else:
                assert program == "curl"
                answer = subprocess.run([program, *words], capture_output=True, text=True, timeout=600)
                assert answer.returncode == 0 and '"text"' in answer.stdout, answer


EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py") if not path.name.startswith("train"))
"""Tests of their own run those that train."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_programs_run(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.import_module(name).main()
