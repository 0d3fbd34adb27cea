"""A rank process: ``python -m nxd_infer.runtime.rank_process.main rank N --config JSON``.

Started only by the supervisor. It dies with its parent (PDEATHSIG), sets its cores and threads, imports what it needs
unless it was forked from a process that has it, and then handles records: read one, run, write the outputs (rank 0),
answer (``rank.py``). The first record makes it load its rank of the artifact, whose files have been verified by then.
It never unpickles anything.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys

from nxd_infer.processes.own import die_with_parent, ignore_stop, leave, name_process
from nxd_infer.runtime.rank_process.config import RankConfig


def main(arguments: list[str]) -> int:
    config = RankConfig.from_json(arguments[arguments.index("--config") + 1])
    die_with_parent(config.parent)
    name_process(f"nxd rank {config.rank}")
    ignore_stop()
    faulthandler.enable()
    # Without cores use those of the caller's process, because the thread that started this one may be limited to fewer.
    os.sched_setaffinity(0, config.cores or os.sched_getaffinity(config.parent))
    if config.crew:
        _settle_openmp(config.cores)
    gc.disable()  # imported objects stay, and scanning them takes an eighth of the import
    from nxd_infer.runtime.rank_process import rank  # slow: torch, which reads the settings above

    return rank.run(config)


def _settle_openmp(cores: list[int]) -> None:
    """Set OpenMP's threads, which run larger loops of graphs, to the cores of the operators' crew. Call before torch.

    Each of its threads has a core, the first one the first core, which the engine leaves free. They sleep while they
    wait: by default they spin for some milliseconds, which takes half a core from the crew.
    """
    for name in ("OMP_PLACES", "OMP_PROC_BIND"):  # they would override the next variable
        os.environ.pop(name, None)
    os.environ["GOMP_CPU_AFFINITY"] = " ".join(map(str, cores))
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # about 100 microseconds


if __name__ == "__main__":
    leave(main(sys.argv[1:]))  # nothing to clean up, and torch's exit handlers can hang on a dead peer
