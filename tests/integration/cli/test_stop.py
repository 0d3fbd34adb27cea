"""A signal whose exception is lost ends the command at the next place that asks."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

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


def test_an_ignored_interrupt_stays_ignored():
    code = "import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from nxd_infer.cli import stop;"
    code += "stop.install(); os.kill(os.getpid(), signal.SIGINT); print('there')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "there\n"
