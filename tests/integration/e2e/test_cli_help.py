"""What the command line says of itself: help, completion, and how a former name is written now."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.e2e.command import ROOT, nxd_infer_here

COMMANDS = ("trace", "recompile", "serve", "generate", "verify", "doctor", "demo")


@pytest.mark.parametrize("command", [*COMMANDS, "ckpt", ""])
def test_help_shows_an_example(command, capsys, monkeypatch):
    done = nxd_infer_here(capsys, monkeypatch, *command.split(), "--help")
    assert done.status == 0
    assert f"nxd-infer {command}" in done.out.replace("\n", " ").split("Example:")[1]


@pytest.mark.parametrize(("words", "shown"), [(["--help"], "serve"), (["serve", "--help"], "--max-choices")])
def test_help_loads_neither_torch_nor_what_answers_http(words, shown):
    code = (
        f"import sys; sys.argv = ['nxd-infer', *{words}]\n"
        "from nxd_infer.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: print('LOADED', {'torch', 'fastapi', 'uvicorn', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert "LOADED set()" in done.stdout and shown in done.stdout, done.stderr


@pytest.mark.parametrize(("module", "words"), [("nxd_infer", COMMANDS), ("bench", ("start", "--help"))])
def test_the_packages_are_programs_that_explain_themselves_without_torch(module, words):
    code = (
        f"import runpy, sys; sys.argv = [{module!r}, '--help']\n"
        f"try: runpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end: print('ENDED', end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert "ENDED 0 False" in done.stdout, done.stdout + done.stderr
    assert all(word in done.stdout for word in words), done.stdout


def test_a_prompt_may_have_its_former_name(capsys, monkeypatch):
    done = nxd_infer_here(capsys, monkeypatch, "generate", "/no/such/artifact", "--prompt", "x")
    assert (
        done.status == 1 and 'note: --prompt needs no name any more: nxd-infer generate ARTIFACT "PROMPT"' in done.err
    )
    assert "/no/such/artifact" in done.err


def test_shells_complete_commands_and_options():
    code = "import sys; sys.argv = ['nxd-infer']; from nxd_infer.cli.main import main; main()"
    for typed, found in (("nxd-infer ge", ["generate"]), ("nxd-infer trace --prompt", ["--prompt-buckets"])):
        words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
        environment = {**os.environ, "_NXD_INFER_COMPLETE": "complete_bash", **words}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env=environment
        )
        assert done.stdout.split() == found, done.stderr
