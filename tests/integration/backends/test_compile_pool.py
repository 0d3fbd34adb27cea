"""The processes that compile graphs end with the trace that they compile for, and so do the compilers that they run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.processes import gone, wait_until

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


def test_a_compiler_ends_with_the_trace_that_started_it(tmp_path: Path) -> None:
    """Also what the compiler has started: those of Neuron are programs that run several others, for many minutes."""
    trace = subprocess.Popen([sys.executable, "-c", TRACE, str(tmp_path)])
    try:
        wait_until(lambda: (tmp_path / "pid").exists() or trace.poll() is not None, 300)
        compiler = int((tmp_path / "pid").read_text())
    finally:
        trace.kill()
        trace.wait(60)
    assert gone(compiler, 60)
