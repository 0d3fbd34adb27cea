"""The program of one rank: ``python -m nxd_infer.recipes.rank_main JSON``. :mod:`.launch` starts it."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from rich.console import Console

from nxd_infer.errors import NxdError
from nxd_infer.recipes.launch import Start
from nxd_infer.recipes.loop import train
from nxd_infer.recipes.recipe import load
from nxd_infer.util.this_process import die_with_parent, name_process


def main(text: str) -> None:
    start = Start(**json.loads(text))
    die_with_parent(start.parent)
    name_process("nxd-train")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # restores the terminal
    try:
        train(load(start.file, start.overrides), Path(start.log_dir), Console())  # errors are for the log
    except NxdError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
