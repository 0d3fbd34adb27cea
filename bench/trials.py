"""Trials that a server of any size must survive under load: a swap of all weights, a full disk, a stopped rank, a
truncated shard, a rank stopped while the disk is full. Only answers of a lost rank may be lost, and every wait has a
timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from bench.client import Stream, checked, stream
from bench.model import prompts
from bench.recovery import PROMPT, STREAMS, again_after, ranks_of
from bench.server import Server

ADMIN_KEY = "admin"
SWAP_SECONDS = 300.0
END_SECONDS = 120.0
ON_A_SMALL_DISK = (
    *("/usr/bin/unshare", "-rm", "/bin/sh", "-c"),
    '/bin/mount -t tmpfs -o size=64k tmpfs "$0" && TMPDIR="$0" && export TMPDIR && exec "$@"',
)
"""Runs a command that follows a directory, where it has a file system of its own for temporary files."""


def trials(artifact: Path, model: Path, found: dict[str, float]) -> None:
    """Put the seconds of each trial into ``found``; raises SystemExit with the first one that fails."""
    arguments = ("--admin-key", ADMIN_KEY, "--weights-root", str(model.parent))
    with Server(artifact, arguments=arguments) as server:
        found["swap"] = asyncio.run(_swap(server, model, 200))
        limits = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (1000, limits[1]))  # simulates a full disk
        found["swap, full disk: refused"] = asyncio.run(_swap(server, model, 503))
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, limits)
        found["rank stopped to ready"] = asyncio.run(again_after(signal.SIGSTOP, server, model, 1))
        server.stop()
    found["rank stopped to ready, full disk"] = _on_a_full_disk(artifact, model, arguments)
    found["shard cut short, to the end"] = _cut_short(artifact, model)


async def _swap(server: Server, model: Path, status: int) -> float:
    """Swap all weights while streams run: none of them may be cut."""
    begin = time.perf_counter()
    swapping = asyncio.create_task(asyncio.to_thread(_post_swap, server, model))
    streams: list[Stream] = []
    while not swapping.done() or not streams:
        more = (stream(server.port, prompt, 32) for prompt in _prompts(model, len(streams)))
        streams += await asyncio.gather(*more)
    found, text, end = await swapping
    if found != status:
        raise SystemExit(f"a swap was answered {found} instead of {status}: {text}")
    checked(streams, 0.0)
    return end - begin


def _post_swap(server: Server, model: Path) -> tuple[int, str, float]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/weights",
        json.dumps({"path": model.name, "timeout": SWAP_SECONDS}).encode(),
        {"authorization": f"Bearer {ADMIN_KEY}", "content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=SWAP_SECONDS) as answer:
            return answer.status, answer.read().decode(), time.perf_counter()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), time.perf_counter()


def _on_a_full_disk(artifact: Path, model: Path, arguments: Sequence[str]) -> float:
    """Stop a rank while TMPDIR is full, and try a swap. Returns not-a-number where mounting is not allowed."""
    with tempfile.TemporaryDirectory() as folder:
        within = (*ON_A_SMALL_DISK, folder)
        if subprocess.run([*within, "/bin/true"], capture_output=True, timeout=60).returncode:
            return float("nan")
        with Server(artifact, arguments=arguments, within=within) as server:
            with contextlib.suppress(OSError), Path(f"/proc/{server.pid}/root{folder}/filler").open("wb") as filler:
                while True:
                    filler.write(bytes(1024))
                    filler.flush()
            seconds = asyncio.run(again_after(signal.SIGSTOP, server, model, 2))
            asyncio.run(_swap(server, model, 503))
            server.stop()
            return seconds


def _cut_short(artifact: Path, model: Path) -> float:
    """Truncate a shard and kill its rank: the server must name the file and exit."""
    copy = artifact.with_name(f"{artifact.name}-cut")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(artifact, copy, copy_function=os.link)
    (shard,) = copy.glob("weights/rank_01.safetensors")
    own = shard.with_suffix(".own")
    shutil.copyfile(shard, own)
    own.replace(shard)
    try:
        with Server(copy) as server:
            half = shard.stat().st_size // 2
            os.truncate(shard, half)
            begin = time.perf_counter()
            os.kill(ranks_of(server.pid)[-1], signal.SIGKILL)
            status = server.process.wait(END_SECONDS)
            if status != 1 or shard.name not in server.tail():
                raise SystemExit(f"with a shard cut short, the server ended with status {status}:\n{server.tail()}")
            return time.perf_counter() - begin
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _prompts(model: Path, number: int) -> Sequence[Sequence[int]]:
    return prompts(model, STREAMS, PROMPT, 1000 + number)
