"""On a real Neuron machine, signatures come first: where they are other ones, nothing else is tried.

And what loads a program in the tests' own process has one of its own there: cores belong to a process until it ends.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.neuron.machines import REAL

ALONE = "NEURON_TEST_ALONE"
TAKE_CORES = {"program", "load"}
"""Fixtures that do so."""
SECONDS = 800


@pytest.fixture(scope="session", autouse=True)
def real_signatures() -> None:
    if REAL and ALONE not in os.environ:
        command = [sys.executable, "-m", "tests.support.neuron.contract"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode or done.stdout.strip():
            said = done.stdout.strip() or done.stderr.strip()[-3000:]
            pytest.exit(f"torch_neuronx is not that of the contract: {said}", 1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    skipped = any(mark.args[0] for mark in item.iter_markers("skipif"))
    if not REAL or ALONE in os.environ or skipped or not TAKE_CORES & {*getattr(item, "fixturenames", ())}:
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", item.nodeid]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=item.config.rootpath,
        env={**os.environ, ALONE: "1"},
    )
    said, outcome = done.stdout + done.stderr[-3000:], "failed" if done.returncode else "passed"
    where = None if outcome == "passed" else said
    if outcome == "passed" and " passed" not in said.splitlines()[-1]:
        outcome, where = "skipped", (str(item.path), 0, said.splitlines()[-2])
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    report = pytest.TestReport(item.nodeid, item.location, {}, outcome, where, "call")  # type: ignore[arg-type]
    item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
