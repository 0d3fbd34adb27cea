"""The program of one rank: ``python -m nxd_infer.recipes.rank_main PARENT LOG_DIR FILE OVERRIDE...`` (`launch.py`)."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from rich.console import Console

from nxd_infer.errors import NxdError
from nxd_infer.processes.own import die_with_parent, name_process
from nxd_infer.recipes.loop import train
from nxd_infer.recipes.recipe import load


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
