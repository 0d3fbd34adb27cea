"""examples/train.py, which docs/training.md shows, under torchrun: it trains, resumes, and every process ends well."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

import nxd_infer as nxd
from nxd_infer.distributed import ParallelizersManager
from nxd_infer.errors import NotInitializedError, NxdError
from nxd_infer.modules.lora import LoraConfig, LoRAModel
from nxd_infer.optimizer import NxDOptimizer
from nxd_infer.pipeline import NxDPPModel
from nxd_infer.trainer import save_checkpoint
from nxd_infer.util.ports import free_port
from nxd_models import registry
from tests.support.tiny_models import VOCAB_SIZE, write_tiny

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/train.py"


def torchrun(script: Path, *arguments: object, cwd: Path) -> str:
    """What rank 0 of two wrote on standard error; the other one shows nothing of its progress."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    logs = Path(tempfile.mkdtemp(prefix="logs", dir=cwd))
    done = subprocess.run(
        [*launcher, "--redirects", "3", "--log-dir", str(logs), str(script), *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    errors = {path.parent.name: path.read_text() for path in logs.rglob("stderr.log")}
    assert done.returncode == 0, done.stderr + "\n".join(text[-2000:] for text in errors.values())
    assert sorted(errors) == ["0", "1"] and "step" not in errors["1"]
    return errors["0"]


def line_of(step: str, lines: list[str]) -> str:
    """The last line of a step: there is one more every ten seconds."""
    *_, found = [line for line in lines if f"step {step}  loss" in line]
    return found


def loss(line: str) -> float:
    return float(re.findall(r"loss (\S+)", line)[0])


def test_the_document_shows_the_example():
    (shown,) = re.findall(r"## The loop\n.*?```python\n(.*?)```", (ROOT / "docs/training.md").read_text(), re.DOTALL)
    assert shown == EXAMPLE.read_text()
    assert "torchrun --nproc_per_node=2 examples/train.py ./llama ckpts --steps 20" in EXAMPLE.read_text()


def test_the_example_trains_and_goes_on_where_it_was(tmp_path: Path):
    write_tiny("llama", tmp_path / "llama")
    first = torchrun(
        EXAMPLE, "llama", "ckpts", "--steps", 20, "--lr", 0.01, "--text", EXAMPLE, cwd=tmp_path
    ).splitlines()
    assert loss(line_of("20/20", first)) < loss(line_of("1/20", first))

    # The same checkpoint on two pipeline stages, and the names of the reference, for a script that is ported by its
    # imports alone.
    ported = tmp_path / "ported.py"
    ported.write_text(
        EXAMPLE.read_text()
        .replace(
            "import nxd_infer as nxd",
            "import nxd_infer.compat\nnxd_infer.compat.install()\nimport neuronx_distributed as nxd",
        )
        .replace("from nxd_infer.trainer", "from neuronx_distributed.trainer")
    )
    again = torchrun(
        ported, "llama", "ckpts", "--steps", 20, "--lr", 0.01, "--tp", 1, "--pp", 2, "--text", EXAMPLE, cwd=tmp_path
    ).splitlines()
    assert line_of("21/40", again).startswith("training 52%")
    assert re.search(r"bubble \d+%", line_of("40/40", again)), again
    assert loss(line_of("40/40", again)) < loss(line_of("20/20", first))
    assert {"step_20", "step_40"} <= {path.name for path in (tmp_path / "ckpts").iterdir()}
    assert (tmp_path / "ckpts/step_40/model.tp_rank_00.pp_rank_01.safetensors").exists()


def test_the_document_traces_checkpoints(tmp_path: Path):
    trained = registry.load_model(write_tiny("llama", tmp_path / "llama"))
    for tag in ("step_100", "step_200"):
        save_checkpoint(tmp_path / "ckpts", tag, trained)
    text = (ROOT / "docs/training.md").read_text()
    (program,) = re.findall(r"```python\n([^`]*?def get_decoder.*?)```", text, re.DOTALL)
    program = program.replace("tp_degree=4,", 'tp_degree=2, backend="eager",')
    (tmp_path / "serving.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "serving.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert f"[1, 64, {VOCAB_SIZE}]" in done.stdout


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WORLD_SIZE": "2"}, "the environment has no RANK, MASTER_ADDR, MASTER_PORT: start"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number of at least 1, got 'two'"),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "::1", "MASTER_PORT": "1", "PJRT_DEVICE": "NEURON"},
            "PJRT_DEVICE=NEURON: training over XLA devices is not supported yet",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "first", "MASTER_ADDR": "::1", "MASTER_PORT": "1"},
            "RANK must be a whole number of at least 0, got 'first'",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "::1", "MASTER_PORT": "1", "LOCAL_RANK": "x"},
            "LOCAL_RANK must be a whole number of at least 0, got 'x'",
        ),
        (  # alone on a machine that says it has GPUs, which it would not train on
            {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "::1", "MASTER_PORT": "1", "LOCAL_RANK": "0"},
            r"LOCAL_RANK=0, but this machine has 0 GPU\(s\)",
        ),
    ],
)
def test_a_launched_process_never_goes_on_alone(environment: dict[str, str], said: str, monkeypatch, tmp_path: Path):
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT", "PJRT_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    config = nxd.neuronx_distributed_config()
    adapted = LoRAModel(nn.Sequential(nn.Linear(2, 2)), LoraConfig(target_modules=["0"]))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "LOCAL_RANK" in environment)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    param = nn.Parameter(torch.ones(2))
    for action in (
        nxd.neuronx_distributed_config,
        nxd.parallel_state.initialize_model_parallel,
        lambda: nxd.initialize_parallel_model(config, nn.Linear, 2, 2),
    ):
        with pytest.raises(NxdError, match=said):
            action()
    if environment["WORLD_SIZE"] == "2":
        for what, action in (
            ("NxDOptimizer", lambda: NxDOptimizer([param], torch.optim.SGD)),
            ("NxDPPModel", lambda: NxDPPModel(nn.Linear(2, 2))),
            ("parallelize", lambda: ParallelizersManager.parallelizer_for_model("llama").parallelize(nn.Linear(2, 2))),
            ("clip_grad_norm", lambda: nxd.parallel_layers.clip_grad_norm([param], 1.0)),
            ("save_checkpoint", lambda: nxd.save_checkpoint(tmp_path, "first", nn.Linear(2, 2))),
            ("save", lambda: nxd.parallel_layers.save({"step": 1}, tmp_path / "one")),
            ("save_adapter", lambda: adapted.save_adapter(tmp_path / "adapter")),
        ):
            with pytest.raises(NotInitializedError, match=f"{what}: this process is one of 2, but model parallelism"):
                action()
    assert not list(tmp_path.iterdir()) and not torch.distributed.is_initialized()


def test_a_rank_that_never_comes_is_waited_for_no_longer_than_asked(monkeypatch):
    port = str(free_port())
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NotInitializedError, match=f"rank 0 did not meet .* of 2 at 127.0.0.1:{port} within 0.5 s"):
        nxd.parallel_state.initialize_model_parallel(timeout=0.5)
    assert not torch.distributed.is_initialized()
