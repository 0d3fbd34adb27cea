"""A rank process: ``python -m nxd_infer.runtime.rank.main rank N --config JSON``. Started by the supervisor only.

It dies with its parent (PDEATHSIG), keeps to its cores and threads, imports what it needs, and then waits for records:
read one, run, write the outputs (rank 0), answer (``loop.py``). The first one has it load its rank of the artifact,
whose files have been verified by then. It never unpickles anything.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys

from nxd_infer.runtime.rank.config import RankConfig
from nxd_infer.util.processes import die_with_parent, name_process


def main(arguments: list[str]) -> int:
    config = RankConfig.from_json(arguments[arguments.index("--config") + 1])
    die_with_parent(config.parent)
    name_process(f"nxd rank {config.rank}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    # Without cores: where the caller's process may be, though the thread that has started this one may keep to fewer.
    os.sched_setaffinity(0, config.cores or os.sched_getaffinity(config.parent))
    if config.crew:
        _settle_openmp(config.cores)
    gc.disable()  # what is imported stays: to look through it again and again takes an eighth of the import
    from nxd_infer.runtime.rank import loop  # slow: torch, which reads what was settled above

    return loop.run(config)


def _settle_openmp(cores: list[int]) -> None:
    """OpenMP runs the larger loops of a compiled graph, on the cores of the operators' crew. Before torch is imported.

    Its threads keep to a core each, the first of them to the first core, which the engine leaves alone; and they wait
    asleep: one that waits awake, as they do by default for some milliseconds, takes half a core from the crew.
    """
    for name in ("OMP_PLACES", "OMP_PROC_BIND"):  # they would go before the next
        os.environ.pop(name, None)
    os.environ["GOMP_CPU_AFFINITY"] = " ".join(map(str, cores))
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # some 100 microseconds


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing to tidy: states end with the process, and torch's exit handlers can hang on a dead peer
