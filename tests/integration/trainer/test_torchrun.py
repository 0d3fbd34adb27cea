"""examples/train.py, whose core docs/training.md shows: under torchrun, resumed, and over two machines.

A machine is a namespace of the network, with a cable between the two, and one of processes, as shared memory joins all
ranks that see one another (`One host` in docs/training.md); so every value goes over the cable, in gloo's sockets.
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

import nxd_infer as nxd
from nxd_infer.errors import NotInitializedError
from nxd_infer.trainer import save_checkpoint
from nxd_infer.util.ports import free_port
from nxd_models import registry
from tests.support.tiny_models import VOCAB_SIZE, write_tiny

DOCUMENTS = Path(__file__).parents[3] / "docs"
EXAMPLE = Path(__file__).parents[3] / "examples/train.py"
STEPS = 6
CABLE, ADDRESSES, PORT = "nxd0", ("10.213.7.1", "10.213.7.2"), 29511  # inside the namespaces alone
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
Launch = tuple[list[str], dict[str, str]]
ALONE: list[Launch] = [([*TORCHRUN, "--standalone", "--nproc-per-node=2"], {})]


def train(cwd: Path, launches: list[Launch], *arguments: object) -> str:
    """Run a program, each launch a prefix of its command with variables of its own; all that the ranks show."""
    running = [
        subprocess.Popen(
            [*command, *map(str, arguments)],
            cwd=cwd,
            env={**ENVIRONMENT, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, variables in launches
    ]
    try:
        texts = [process.communicate(timeout=420)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [process.returncode for process in running] == [0] * len(running), "\n".join(text[-3000:] for text in texts)
    return "\n".join(texts)


def example(folder: str, *options: object) -> tuple[object, ...]:
    return EXAMPLE, "llama", folder, "--steps", STEPS, "--lr", 0.01, "--text", EXAMPLE, *options


def losses(shown: str) -> dict[int, str]:
    """Of each step that has a line, which one rank shows; the last step has one more."""
    return {int(step): loss for step, loss in re.findall(r"step (\d+)/\d+ +loss (\S+)", shown)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The example's first start under torchrun, as the document says: the folder, and what it has shown."""
    cwd = tmp_path_factory.mktemp("trained")
    write_tiny("llama", cwd / "llama")
    return cwd, train(cwd, ALONE, *example("one"))


def test_the_document_shows_the_example():
    (shown,) = re.findall(r"## The loop\n.*?```python\n(.*?)```", (DOCUMENTS / "training.md").read_text(), re.DOTALL)
    assert shown in EXAMPLE.read_text()
    assert "torchrun --nproc_per_node=2 examples/train.py ./llama ckpts --steps 20" in EXAMPLE.read_text()


@pytest.mark.smoke
def test_the_example_trains_and_goes_on_where_it_was(trained: tuple[Path, str]):
    """On two pipeline stages, and with the reference's names, for a script that is ported by its imports alone."""
    cwd, first = trained
    assert first.count(f"step 1/{STEPS} ") == 1, "one rank shows its progress"
    assert float(losses(first)[STEPS]) < float(losses(first)[1])
    ported = cwd / "ported.py"
    ported.write_text(
        EXAMPLE.read_text()
        .replace(
            "import nxd_infer as nxd",
            "import nxd_infer.compat\nnxd_infer.compat.install()\nimport neuronx_distributed as nxd",
        )
        .replace("from nxd_infer.trainer", "from neuronx_distributed.trainer")
    )
    shutil.copytree(cwd / "one", cwd / "two")
    again = train(cwd, ALONE, ported, *example("two", "--tp", 1, "--pp", 2)[1:])
    assert f"training 58%  step {STEPS + 1}/{2 * STEPS} " in again
    assert re.search(rf"step {2 * STEPS}/{2 * STEPS} .*bubble \d+%", again), again
    assert float(losses(again)[2 * STEPS]) < float(losses(first)[STEPS])
    assert {f"step_{STEPS}", f"step_{2 * STEPS}"} <= {path.name for path in (cwd / "two").iterdir()}
    assert (cwd / f"two/step_{2 * STEPS}/model.tp_rank_00.pp_rank_01.safetensors").exists()


def test_the_document_traces_checkpoints(tmp_path: Path):
    trained = registry.load_model(write_tiny("llama", tmp_path / "llama"))
    for tag in ("step_100", "step_200"):
        save_checkpoint(tmp_path / "ckpts", tag, trained)
    page = (DOCUMENTS / "tracing.md").read_text()
    (program,) = re.findall(r"```python\n([^`]*?def get_decoder.*?)```", page, re.DOTALL)
    program = program.replace("tp_degree=4,", 'tp_degree=2, backend="eager",')
    (tmp_path / "serving.py").write_text(program)
    assert f"[1, 64, {VOCAB_SIZE}]" in train(tmp_path, [([sys.executable], {})], "serving.py")


def test_a_rank_that_never_comes_is_waited_for_no_longer_than_asked(monkeypatch):
    port = str(free_port())
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NotInitializedError, match=f"rank 0 did not meet .* of 2 at 127.0.0.1:{port} within 0.5 s"):
        nxd.parallel_state.initialize_model_parallel(timeout=0.5)
    assert not torch.distributed.is_initialized()


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


def test_two_machines_train_as_one_does(machines: tuple[str, str], trained: tuple[Path, str]):
    cwd, one = trained
    launches: list[Launch] = [
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
    before = [received(machine) for machine in machines]
    two = train(cwd, launches, *example("machines"))
    assert [losses(two)[step] for step in (1, STEPS)] == [losses(one)[step] for step in (1, STEPS)]

    weights = [cwd / name / f"step_{STEPS}" for name in ("one", "machines")]
    files = [{path.name: load_file(path) for path in place.rglob("model.*.safetensors")} for place in weights]
    assert files[0] and files[0].keys() == files[1].keys()
    for name, tensors in files[0].items():
        for key, tensor in tensors.items():
            torch.testing.assert_close(files[1][name][key], tensor, rtol=0, atol=1e-6)
    size = sum(tensor.numel() * 4 for tensors in files[0].values() for tensor in tensors.values())
    for machine, earlier in zip(machines, before, strict=True):  # every step brings activations
        assert received(machine) - earlier > STEPS * size / 4
