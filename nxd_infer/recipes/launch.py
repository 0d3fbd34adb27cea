"""The ranks of a recipe: started here, or this process is one of torchrun's or Slurm's.

``python -m nxd_infer.recipes.launch PARENT LOG_DIR FILE OVERRIDE...`` is a rank that was started here.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from nxd_infer.errors import NxdError, RecipeError
from nxd_infer.processes.command import python_module
from nxd_infer.processes.own import die_with_parent, name_process
from nxd_infer.processes.ranks import run_ranks
from nxd_infer.recipes.loop import train
from nxd_infer.recipes.recipe import Loaded, load

PORT = 29400
"""The first port of a Slurm job's ranks."""


def is_a_rank(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process as one of several."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def variables_of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a task of ``srun`` with several; nothing for any other process."""
    tasks = environment.get("SLURM_NTASKS", "1")
    if is_a_rank(environment) or "SLURM_PROCID" not in environment or not tasks.isdecimal() or int(tasks) < 2:
        return {}
    job = int(environment.get("SLURM_JOB_ID", "0"))
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(environment.get("SLURM_JOB_NODELIST", "127.0.0.1")),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(PORT + job % 10000),
    }


def first_host(nodes: str) -> str:
    """Return the first of Slurm's ``trn[003-007,9],head``: ``trn003``."""
    match = re.match(r"([^\[,]+)(?:\[(\d+))?", nodes)
    if match is None:
        raise RecipeError(f"SLURM_JOB_NODELIST = {nodes!r} names no host: set MASTER_ADDR")
    return match[1] + (match[2] or "")


def check_world(loaded: Loaded, environment: Mapping[str, str]) -> None:
    """Raise RecipeError unless a launcher has started as many ranks as the recipe has."""
    wanted, found = loaded.recipe.world_size, int(environment.get("WORLD_SIZE", "1"))
    if wanted != found:
        trainer = loaded.recipe.trainer
        asked = f"x trainer.num_nodes = {trainer.devices} x {trainer.num_nodes}"
        nearest = f"the nearest is trainer.devices={found} trainer.num_nodes=1"
        problem = f"{asked} is not the {found} processes that were started; {nearest}"
        raise loaded.tree.error("trainer.devices", problem)


def start_ranks(loaded: Loaded, file: Path, overrides: Sequence[str], log_dir: Path) -> None:
    """Start a process per rank on this machine, and wait for them. Raises RankFailedError with the end of the log.

    Raises RecipeError for a recipe of several machines.
    """
    if loaded.recipe.trainer.num_nodes > 1:
        several = f"= {loaded.recipe.trainer.num_nodes}: start it on each machine, by torchrun or srun"
        raise loaded.tree.error("trainer.num_nodes", f"{several}; on this one alone the nearest is 1")
    log_dir.mkdir(parents=True, exist_ok=True)
    command = python_module("nxd_infer.recipes.launch", str(os.getpid()), str(log_dir), str(file), *overrides)
    run_ranks(command, loaded.recipe.world_size, log_dir / "ranks.log", timeout=None)


def main(parent: str, log_dir: str, file: str, *overrides: str) -> None:
    die_with_parent(int(parent))
    name_process("nxd-train")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # restores the terminal
    try:
        train(load(file, overrides), Path(log_dir), Console())  # errors are for the log
    except NxdError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
