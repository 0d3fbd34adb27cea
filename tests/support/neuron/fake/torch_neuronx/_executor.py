"""Runs programs in a process of its own (:mod:`._worker`), which has a replica for each rank."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch
from torch import Tensor

_SECONDS = 300
_started: dict[int, tuple[Connection, Any]] = {}


def load(hlo: bytes, ranks: int) -> tuple[int, int]:
    """The program's number."""
    return ranks, int(_ask(ranks, b"load" + hlo))


def run(program: tuple[int, int], ranks: list[list[Tensor]]) -> list[list[Tensor]]:
    degree, number = program
    question = io.BytesIO()
    torch.save({"program": number, "ranks": ranks}, question)
    return torch.load(io.BytesIO(_ask(degree, b"run " + question.getvalue())), weights_only=True)


def _ask(ranks: int, question: bytes) -> bytes:
    if ranks not in _started:
        _started[ranks] = _start(ranks)
    connection, process = _started[ranks]
    try:
        connection.send_bytes(question)
        if not connection.poll(_SECONDS):
            raise EOFError(f"no answer in {_SECONDS} s")
        answer = connection.recv_bytes()
    except (EOFError, OSError) as error:
        process.kill()
        del _started[ranks]
        raise RuntimeError(f"NRT: the cores' process ended: {error}") from error
    if answer.startswith(b"error"):
        raise RuntimeError(answer.removeprefix(b"error").decode())
    return answer.removeprefix(b"answer")


def _start(ranks: int) -> tuple[Connection, Any]:
    ours, theirs = Pipe()
    environment = {
        **os.environ,
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(ranks),
        "XLA_ENABLE_PARAM_ALIASING": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *sys.path])),
    }
    file = os.path.join(os.path.dirname(__file__), "_worker.py")
    process = subprocess.Popen(
        [sys.executable, file, str(theirs.fileno()), str(ranks)], pass_fds=[theirs.fileno()], env=environment
    )
    theirs.close()
    return ours, process
