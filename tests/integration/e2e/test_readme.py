"""The README tells the truth: every command in it is run, in its order, in one directory."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from nxd_infer.util.ports import free_port
from tests.support.e2e.command import ROOT

README = (ROOT / "README.md").read_text()
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
# Made shorter, not left out: a test need not train for a minute, nor compile what other tests compile.
SHORTER = {"--seconds 60": "--seconds 2 --backend eager", "--dtype float32": "--dtype float32 --backend eager"}
PORT = "8000"
VENV = re.findall(r"^VENV \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0]


def console_commands() -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def test_the_make_commands_are_targets():
    block = README.split("```")[1]
    targets = re.findall(r"^make ([\w-]+)", block, re.MULTILINE)
    assert targets == ["demo", "test", "test-xla"]
    for target in [*targets, "check", "bench", "soak", "lint"]:
        subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True, timeout=600)


def test_every_link_leads_somewhere():
    broken = [
        f"{page.name}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text())
        if not target.startswith("http") and not (page.parent / target).exists()
    ]
    assert broken == []


def test_every_path_that_a_page_names_is_there():
    texts = {page.name: page.read_text() for page in PAGES if page.name != "CHANGELOG.md"}
    paths = [
        (page, path)
        for page, text in texts.items()
        for path in re.findall(r"`((?:nxd_infer|tests|docs|models|server|deploy|examples)/[\w./]*)`", text)
    ]
    assert len(paths) > 60 and [(page, path) for page, path in paths if not (ROOT / path).exists()] == []


def test_every_torchrun_over_machines_says_how_they_meet():
    lines = [
        line
        for page in PAGES
        for line in page.read_text().replace("\\\n", "").splitlines()
        if "torchrun" in line and re.search(r"--nnodes[= ](?!1\b)", line)
    ]
    # Without either, torchrun takes each machine for the first one.
    assert lines and [line for line in lines if not re.search("--rdzv[-_]backend|--node[-_]rank", line)] == []


def test_every_command_that_the_pages_name_exists():
    from nxd_infer.cli.main import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    known |= {group.name for group in app.registered_groups}
    for page in PAGES:
        for name in re.findall(r"^(?:\$ )?nxd-infer (\w+)", page.read_text(), re.MULTILINE):
            assert name in known, f"{page.name} names `nxd-infer {name}`"


def test_the_console_session_runs_as_written(tmp_path):
    port = free_port()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    server = None
    try:
        for written in console_commands():
            command = written.replace(PORT, str(port))
            for long, short in SHORTER.items():
                command = command.replace(long, short)
            arguments = shlex.split(command)
            if arguments[0] == "source":
                assert arguments[1] == f"{VENV}/bin/activate"
                continue  # its programs are first on the PATH here, too
            if arguments[0] == "nxd-infer":
                arguments[:1] = [sys.executable, "-m", "nxd_infer.cli.main"]
            if " serve " in command:
                server = subprocess.Popen(arguments, cwd=tmp_path, env=env, stderr=subprocess.DEVNULL)
                wait_ready(port, server)
                continue
            done = subprocess.run(arguments, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            if arguments[0] == "curl":
                assert '"text"' in done.stdout, done.stdout
        assert server is not None
        server.terminate()
        assert server.wait(60) == 0
    finally:
        if server is not None and server.poll() is None:
            server.kill()


def test_the_example_programs_run():
    with_arguments = {*(ROOT / "examples").glob("train*.py")}  # tests of their own run those
    for program in sorted({*(ROOT / "examples").glob("*.py")} - with_arguments):
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=600, env=env)
        assert done.returncode == 0, f"{program.name}\n{done.stdout}{done.stderr}"


def wait_ready(port: int, server: subprocess.Popen) -> None:
    end = time.monotonic() + 600
    while time.monotonic() < end:
        assert server.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the server was not ready in time")
