"""Ranks that torchrun starts, and ranks that a Trainer starts itself; how they end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.processes import gone
from tests.support.tiny_models import write_tiny

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/train_lightning.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def program(*command: object, cwd: Path, status: int = 0, seconds: float = 420) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def said(done: subprocess.CompletedProcess[str]) -> tuple[int, float]:
    """The step and the loss that the example prints, once."""
    ((step, loss),) = re.findall(r"^step (\d+): loss (\S+)$", done.stdout, re.MULTILINE)
    return int(step), float(loss)


def test_the_example(tmp_path: Path):
    """Started by itself, gone on under torchrun with the other degree; it shows and writes everything once."""
    write_tiny("llama", tmp_path / "llama")
    options = ("llama", "runs", "--text", EXAMPLE, "--lr", 0.01)
    first = program(EXAMPLE, *options, "--epochs", 2, cwd=tmp_path)
    steps, loss = said(first)
    assert len(re.findall(r"Epoch 1: 100%", first.stdout.replace("\r", "\n"))) >= 1
    assert sorted(path.name for path in (tmp_path / "runs/ckpts").iterdir())[-1] == "last.ckpt"
    (events,) = (tmp_path / "runs/lightning_logs").glob("*/events*")
    scalars = EventAccumulator(str(events)).Reload()
    assert [one.step for one in scalars.Scalars("loss")] == list(range(1, steps + 1))
    assert scalars.Scalars("loss")[-1].value == pytest.approx(loss, abs=1e-3)
    assert loss < scalars.Scalars("loss")[0].value
    rates = {one.step: one.value for one in scalars.Scalars("lr-AdamW")}
    assert (rates[0], rates[1]) == pytest.approx((0.01, 0.01 * 0.999))
    again = program(*TORCHRUN, EXAMPLE, *options, "--epochs", 3, "--tp", 1, "--devices", 1, cwd=tmp_path)
    assert said(again)[0] > steps and said(again)[1] < loss


DYING = """
import os, signal, sys
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch.utils.data import DataLoader
import nxd_infer as nxd
from nxd_infer.lightning import NeuronLTModule, NeuronXLAStrategy
from tests.support.lightning.jobs import Rows
from tests.support.trainer.models import llama

print(f"pid {os.getpid()}", flush=True)

class Ends(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1 and trainer.global_rank == 1:
            if sys.argv[1] == "raise":
                raise ValueError("of one rank alone")
            os.kill(os.getpid(), signal.SIGKILL)

config = nxd.neuronx_distributed_config(tensor_parallel_size=2)
module = NeuronLTModule(llama, config, torch.optim.SGD, None, opt_kwargs={"lr": 0.1})
options = dict(logger=False, enable_checkpointing=True, enable_progress_bar=False, enable_model_summary=False)
options |= dict(devices=2, accelerator="cpu", max_epochs=2, callbacks=[Ends(), OnExceptionCheckpoint(".")])
trainer = Trainer(strategy=NeuronXLAStrategy(config), **options)
trainer.fit(module, DataLoader(Rows(), 2))
"""


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_rank_that_ends_ends_the_others(how: str, tmp_path: Path):
    """In bounded time, with the reason; and no process is left."""
    (tmp_path / "dying.py").write_text(DYING)
    done = subprocess.run(
        [sys.executable, "dying.py", how],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=140,  # a collective would wait for 300 seconds
    )
    pids = [int(pid) for pid in re.findall(r"^pid (\d+)$", done.stdout, re.MULTILINE)]
    assert len(pids) == 2
    assert all(gone(pid, 60) for pid in pids)
    assert done.returncode != 0, done.stderr[-3000:]
    # Whichever is faster: a collective of the first rank, or Lightning's look at the processes.
    told = rf"rank\(s\) \[1\] .*: the process has ended|with PID {pids[1]} terminated with code (-9|1)"
    assert re.search(told, done.stderr), done.stderr[-3000:]
    assert ("ValueError: of one rank alone" in done.stderr) == (how == "raise")
    assert not list(tmp_path.glob("*.ckpt"))  # no rank alone has a checkpoint
