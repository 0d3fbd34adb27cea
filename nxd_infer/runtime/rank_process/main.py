"""A rank process: ``python -m nxd_infer.runtime.rank_process.main rank N --config JSON``.

Started only by the supervisor. It dies with its parent (PDEATHSIG), sets its cores, imports what it needs
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
    gc.disable()  # imported objects stay, and scanning them takes an eighth of the import
    from nxd_infer.runtime.rank_process import rank  # slow: torch, which reads the settings above

    return rank.run(config)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))  # nothing to clean up, and torch's exit handlers can hang on a dead peer
