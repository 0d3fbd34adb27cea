"""The processes that compile graphs end with the trace that they compile for, and so do the compilers that they run."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.http.http_servers import wait_for

WORKER = """
import subprocess, sys
from nxd_infer.backends import registry
from nxd_infer.backends.compile.worker import main
class Backend:
    def compile(self, graph, options):
        compiler = subprocess.Popen(["sh", "-c", "sleep 600 & echo $! > pid.part; mv pid.part pid; wait"], cwd=graph)
        compiler.wait()
registry.get = lambda name: Backend()
main(sys.argv[1:])
"""
TRACE = f"""
import sys
from pathlib import Path
from nxd_infer.backends.compile import pool
from nxd_infer.util.python_command import python_code
pool.python_module = lambda name, *arguments: python_code({WORKER!r}, *arguments)
pool.compile_graphs("eager", [Path(sys.argv[1])], {{}})
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "ended"])
def test_a_compiler_ends_with_the_trace_that_started_it(number: signal.Signals, tmp_path: Path) -> None:
    """Also what the compiler has started: those of Neuron are programs that run several others, for many minutes."""
    trace = subprocess.Popen([sys.executable, "-c", TRACE, str(tmp_path)])
    try:
        wait_for(lambda: (tmp_path / "pid").exists() or trace.poll() is not None, 300, "the compiler does not start")
        compiler = int((tmp_path / "pid").read_text())
    finally:
        trace.send_signal(number)
        trace.wait(60)
    wait_for(lambda: not Path(f"/proc/{compiler}").exists(), 60, "the compiler goes on")
