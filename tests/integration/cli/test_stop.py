"""A signal whose exception is lost ends the command at the next place that asks."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.support.e2e.command import nxd_infer_here

LOST = """
import os, signal, sys
from nxd_infer.cli import stop

class Dropped:
    def __del__(self):
        os.kill(os.getpid(), signal.{name})

stop.install()
Dropped()
print("went on", flush=True)
stop.check()
print("and on")
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_during_a_destructor_is_raised_again(name):
    found = subprocess.run(
        [sys.executable, "-c", LOST.format(name=name)], capture_output=True, text=True, timeout=60, check=False
    )
    assert found.stdout == "went on\n" and "Exception ignored in" in found.stderr
    assert found.returncode == (-signal.SIGINT if name == "SIGINT" else 128 + signal.SIGTERM)


def test_a_command_that_a_test_runs_leaves_its_handlers_to_nobody(capsys, monkeypatch):
    """In the process of the tests they would end a later test, at whatever place it is."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert nxd_infer_here(capsys, monkeypatch, "--version").status == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_an_ignored_interrupt_stays_ignored():
    code = "import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from nxd_infer.cli import stop;"
    code += "stop.install(); os.kill(os.getpid(), signal.SIGINT); print('there')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "there\n"
