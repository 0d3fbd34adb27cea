"""A process that compiles graphs: ``python -m nxd_infer.backends.compile.worker BACKEND FD PARENT``.

Reads one JSON job per line from the socket FD and answers each with one; what the compiler prints goes to its output.
Exits with its input, or with its parent, and takes the compiler that it runs along.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

from nxd_infer.backends import registry
from nxd_infer.processes.own import die_with_parent


def _end_all(number: int, frame: object) -> None:
    """Kill this session: a compiler that is left behind goes on for many minutes, with many GB of memory."""
    os.killpg(0, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, _end_all)
    die_with_parent(int(arguments[2]), signal.SIGTERM)
    channel = socket.socket(fileno=int(arguments[1]))
    gc.disable()  # imported objects stay, and scanning them takes a fifth of the import
    import torch  # noqa: F401  (every graph's compiler needs it)

    backend = registry.get(arguments[0])
    gc.freeze()
    gc.enable()
    for line in channel.makefile("r", encoding="utf-8"):
        job = json.loads(line)
        start = time.monotonic()
        answer = {"graph": job["graph"], "error": ""}
        try:
            backend.compile(Path(job["graph"]), job["options"])
        except BaseException as error:
            answer["error"] = f"{type(error).__name__}: {error}"
            answer["traceback"] = traceback.format_exc()
        answer["seconds"] = time.monotonic() - start
        channel.sendall(json.dumps(answer).encode() + b"\n")
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
