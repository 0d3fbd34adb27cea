"""Runs the two rank processes of a training benchmark, one thread each."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.options import Options, home
from bench.process_groups import ROOT, Group, environment

RANKS = 2
SECONDS = 600.0


def figures_of(module: str, options: Options, root: Path = ROOT) -> dict[str, Any]:
    """Run ``python -m MODULE RANK FOLDER ROUNDS QUICK SECONDS`` of the checkout ``root`` on each rank; return what rank
    0 wrote into the folder as ``figures.json``."""
    name = module.rpartition(".")[2]
    env = {**environment(root), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=home()) as folder, ExitStack() as stack:
        groups: list[Group] = []
        for rank in range(RANKS):
            arguments = (rank, folder, options.rounds, options.quick, SECONDS)
            command = [sys.executable, "-m", module, *map(str, arguments)]
            log = home() / "logs" / f"{name}-{rank}.log"
            groups.append(stack.enter_context(Group(command, log, env=env, cwd=root)))
        try:
            status = groups[0].process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            status = f"none after {SECONDS:.0f} s"
        out = Path(folder) / "figures.json"
        if status != 0 or not out.is_file():
            raise SystemExit(f"rank 0 ended with status {status}:\n" + "\n\n".join(group.tail() for group in groups))
        return json.loads(out.read_text())
