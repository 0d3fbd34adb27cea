"""Processes that a script starts have the old names as well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SPAWNING = """
import multiprocessing
import pathlib
import sys
from neuronx_distributed.parallel_layers import layers

def work(queue):
    queue.put(layers.ColumnParallelLinear.__module__)

if __name__ == "__main__":
    sys.path.append(pathlib.Path("of a module"))  # which Python ignores
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    print(queue.get(timeout=120))
    process.join()
"""


@pytest.mark.smoke
def test_processes_that_a_script_spawns_have_the_aliases(tmp_path: Path):
    (tmp_path / "script.py").write_text(SPAWNING)
    command = [sys.executable, "-m", "nxd_infer.compat", str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.stdout == "nxd_infer.parallel_layers.linear\n", done.stderr
