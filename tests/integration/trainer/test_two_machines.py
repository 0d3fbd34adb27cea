"""Training over two machines, by torchrun on each: two network namespaces with a cable between them.

Each machine has a namespace of processes too, as shared memory joins all ranks that see one another (`One host` in
docs/training.md); so every value that the ranks exchange goes over the cable, in gloo's sockets.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nxd_infer.util.ports import free_port
from tests.support.tiny_models import write_tiny

EXAMPLE = Path(__file__).parents[3] / "examples/train.py"
STEPS = 6
LIMIT = 420
CABLE, ADDRESSES, PORT = "nxd0", ("10.213.7.1", "10.213.7.2"), 29511  # inside the namespaces alone


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=60).stdout


def lacking() -> str:
    """What this machine lacks for the test; empty if nothing."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "needs ip and unshare (packages iproute2 and util-linux)"
    name = f"nxd-probe-{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("netns", "delete", name)
    except subprocess.CalledProcessError as error:
        return f"needs root, to make network namespaces: {error.stderr.strip()}"
    return ""


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[str, str]]:
    """The names of two namespaces, each with one end of the cable."""
    if reason := lacking():
        pytest.skip(reason)
    first, second = names = tuple(f"nxd-{os.getpid()}-{number}" for number in range(2))
    with contextlib.ExitStack() as made:
        for name in names:
            ip("netns", "add", name)
            made.callback(ip, "netns", "delete", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", CABLE, "netns", first, "type", "veth", "peer", "name", CABLE, "netns", second)
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", CABLE)
            ip("-n", name, "link", "set", CABLE, "up")
        yield first, second


def received(machine: str) -> int:
    """Bytes that came over the cable."""
    (link,) = json.loads(ip("-n", machine, "-s", "-j", "link", "show", CABLE))
    return link["stats64"]["rx"]["bytes"]


def train(cwd: Path, out: str, launches: list[tuple[list[str], dict[str, str]]], *options: str) -> list[str]:
    """Run the example, each launch a prefix of torchrun's command with its variables; rank 0's lines of losses."""
    program = [str(EXAMPLE), "llama", out, "--steps", str(STEPS), "--lr", "0.01", "--text", str(EXAMPLE), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    running = [
        subprocess.Popen(
            [*command, *program],
            cwd=cwd,
            env={**environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, variables in launches
    ]
    try:
        texts = [process.communicate(timeout=LIMIT)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [process.returncode for process in running] == [0] * len(running), "\n".join(text[-3000:] for text in texts)
    return re.findall(r"step \d+/\d+ +loss \S+", "\n".join(texts))


TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.mark.parametrize("tp", [2, 1], ids=["tp2", "dp2"])
def test_two_machines_train_as_one_does(machines, tp: int, tmp_path: Path):
    write_tiny("llama", tmp_path / "llama")
    alone = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # as torchrun sets them
    ranks = [([sys.executable], {**alone, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    one = train(tmp_path, "one", ranks, f"--tp={tp}")
    before = [received(machine) for machine in machines]
    launches = [
        (
            [
                *("ip", "netns", "exec", machine, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
                *(*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}"),
                *(f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}"),
            ],
            {"GLOO_SOCKET_IFNAME": CABLE},
        )
        for number, machine in enumerate(machines)
    ]
    two = train(tmp_path, "two", launches, f"--tp={tp}")
    assert f"step {STEPS}/{STEPS}" in two[-1] and [two[0], two[-1]] == [one[0], one[-1]]  # more if it takes long

    weights = [tmp_path / name / f"step_{STEPS}" for name in ("one", "two")]
    files = [{path.name: load_file(path) for path in place.rglob("model.*.safetensors")} for place in weights]
    assert files[0] and files[0].keys() == files[1].keys()
    for name, tensors in files[0].items():
        for key, tensor in tensors.items():
            torch.testing.assert_close(files[1][name][key], tensor, rtol=0, atol=1e-6)
    size = sum(tensor.numel() * 4 for tensors in files[0].values() for tensor in tensors.values())
    for machine, earlier in zip(machines, before, strict=True):  # every step brings gradients, or activations
        assert received(machine) - earlier > STEPS * size / 4
