"""A recipe from the command line: trained, killed at a random moment, resumed, traced, served, asked."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nxd_infer.cli.demo.client import stream_completion
from nxd_infer.cli.demo.run import server, wait_ready
from nxd_infer.recipes import launch
from nxd_infer.util.ports import free_port
from tests.support.e2e.command import ROOT, nxd_infer, nxd_infer_here, refused

RECIPE = """name: killed
trainer: {devices: 2, max_steps: 24, log_every_n_steps: 1, enable_progress_bar: false}
exp_manager:
  exp_dir: experiments
  name: ${oc.env:WHICH}
  resume_if_exists: true
  async_checkpointing: true
  checkpoint_callback_params: {every_n_train_steps: 4, save_top_k: 2}
  enable_recovery_time_instrumentation: true
distributed_strategy: {tensor_model_parallel_size: 2}
data:
  train_dir: ${stdlib:pydoc_data/topics.py}
  dev_choose_samples: 1
  micro_batch_size: 2
  global_batch_size: 2
  seq_length: 64
  shuffle: true
  tokenizer: {type: trained, vocab_size: 300}
model:
  num_layers: 2
  hidden_size: 32
  ffn_hidden_size: 64
  num_attention_heads: 4
  num_kv_heads: 2
  optim: {lr: 1e-3, sched: {name: CosineAnnealing, warmup_steps: 2}}
precision: {type: fp32}
trace: {max_len: 64, prompt_buckets: [16], batch_sizes: [1], tp_degree: 1, backend: eager}
"""


def started(folder: Path, which: str, *arguments: object) -> subprocess.Popen:
    """``nxd-infer train`` in a session of its own."""
    command = [sys.executable, "-m", "nxd_infer.cli.main", "train", "recipe.yaml", *map(str, arguments)]
    environment = {**os.environ, "WHICH": which, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def losses(folder: Path, which: str) -> dict[int, float]:
    """The loss of each step, as TensorBoard shows it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "experiments" / which / "version_0"), size_guidance={"scalars": 0})
    events.Reload()
    return {event.step: event.value for event in events.Scalars("loss")}


def test_killed_resumed_traced_and_served(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    whole = started(tmp_path, "whole", "~trace", "trainer.enable_progress_bar=true")
    begin = time.monotonic()
    out, _ = whole.communicate(timeout=600)
    assert whole.returncode == 0, out
    assert "step 24/24" in out  # the user sees the first rank's progress; its errors are in the log
    took = time.monotonic() - begin
    # Killed once the first checkpoint is there, or later: at any moment of the rest.
    killed = started(tmp_path, "killed", "~trace")
    checkpoints = tmp_path / "experiments/killed/version_0/checkpoints"
    deadline = time.monotonic() + 600
    while not list(checkpoints.glob("*/done")) and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(random.uniform(0, took / 10))
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=60)
    # The same command again, and its trace.
    resumed = started(tmp_path, "killed", "--trace", "artifact")
    out, _ = resumed.communicate(timeout=600)
    assert resumed.returncode == 0, out
    assert "going on at step " in out or "nothing to do: trainer.max_steps = 24 is reached" in out  # it was almost done
    undisturbed = losses(tmp_path, "whole")
    assert sorted(undisturbed) == list(range(1, 25))
    assert losses(tmp_path, "killed") == undisturbed
    tags = sorted(path.name for path in checkpoints.iterdir())
    assert tags == ["step=20-consumed_samples=40", "step=24-consumed_samples=48"]
    # What was trained answers.
    port = free_port()
    with server(tmp_path / "artifact", port, tmp_path / "server.log") as process:
        wait_ready(process, port, tmp_path / "server.log")
        answer = stream_completion(port, "The statement", {"max_tokens": 8, "temperature": 0, "ignore_eos": True}, list)
    assert answer.tokens == 8


def test_check_prints_a_plan_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, parameters in (("llama3_8b", "8,030,261,248"), ("llama3_70b", "70,553,706,496")):
        recipe = ROOT / "examples/recipes" / f"{name}.yaml"
        done = nxd_infer_here(capsys, monkeypatch, "train", recipe, "--check")
        assert done.status == 0, done.err
        for word in (parameters, "memory per rank", "tokens per step", "8,388,608", "estimated time", "Trainium 1"):
            assert word in done.out, (word, done.out)
        assert done.out.count("kv_replicator") == 1 and "no effect" in done.out
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_is_one_sentence(tmp_path, capsys, monkeypatch):
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.replace("max_steps:", "max_step:"))
    monkeypatch.setenv("WHICH", "x")
    refused(nxd_infer_here(capsys, monkeypatch, "train", file), f"{file}:2: trainer has no key 'max_step'", "max_steps")
    file.write_text(RECIPE)
    refused(nxd_infer_here(capsys, monkeypatch, "train", file), "trace.out is missing", "--trace OUT")
    asked = nxd_infer_here(capsys, monkeypatch, "train", file, "data.seq_length=many", "--trace", tmp_path / "out")
    refused(asked, "command line: data.seq_length must be a whole number")
    asked = nxd_infer_here(capsys, monkeypatch, "train", file, "trainer.num_nodes=2", "--trace", tmp_path / "out",
                           "data.global_batch_size=4")  # fmt: skip
    refused(asked, "by torchrun or srun")


def test_a_rank_that_fails_says_why(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    done = nxd_infer(
        "train", "recipe.yaml", "~trace", "exp_manager.name=x", "data.global_batch_size=90000", cwd=tmp_path
    )
    refused(done, "ranks.log", "error: ", "the nearest is")


FAILING = """import os, sys, time
from nxd_infer.checkpoint import async_save
from nxd_infer.errors import RecipeError
from nxd_infer.recipes import loop, rank_main

whole, start = loop.Training.train_step, async_save.Outstanding.start
def step(self, batch):
    if self.context.rank == 1 and self.step == 4:
        raise RecipeError("the data's disk is gone")
    return whole(self, batch)
def slow(self, storage, folder, rank, action):
    def later():
        time.sleep(6)  # longer than a launcher is patient
        action()
    start(self, storage, folder, rank, later if rank == 0 else action)
loop.Training.train_step, async_save.Outstanding.start = step, slow
rank_main.main(sys.argv[1])
"""


def test_one_rank_that_fails_in_a_step_ends_the_job_at_once(tmp_path, capsys, monkeypatch):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "rank.py").write_text(FAILING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHICH", "x")
    monkeypatch.setattr(launch, "python_module", lambda _, job: [sys.executable, "rank.py", job])
    done = nxd_infer_here(capsys, monkeypatch, "train", "recipe.yaml", "~trace")
    refused(done, "ranks.log", "the data's disk is gone")
    (log,) = (tmp_path / "experiments/x").glob("**/ranks.log")
    late = [line for line in log.read_text().splitlines() if "did not reach" in line]
    assert all("it has left the group" in line for line in late), late  # its peer would wait for 300 s
    (saved,) = (tmp_path / "experiments/x").glob("version_0/checkpoints/*")
    assert saved.name.startswith("step=4-") and (saved / "done").is_file()  # what was being written then is kept


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_it_runs_under_a_launcher(tmp_path, launcher):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    base = {**os.environ, "OMP_NUM_THREADS": "1", "WHICH": "x"}
    train = [sys.executable, "-m", "nxd_infer.cli.main", "train", "recipe.yaml", "~trace", "trainer.max_steps=2"]
    if launcher == "torchrun":
        run = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc_per_node=2",
            "-m",
            "nxd_infer.cli.main",
            *train[3:],
        ]
        jobs = [subprocess.Popen(run, cwd=tmp_path, env=base, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)]
    else:
        slurm = {"SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "127.0.0.1", "MASTER_PORT": str(free_port())}
        jobs = [
            subprocess.Popen(
                train, cwd=tmp_path, env={**base, **slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
            for rank in range(2)
        ]  # fmt: skip
    for job in jobs:
        out, _ = job.communicate(timeout=600)
        assert job.returncode == 0, out.decode()
    assert sorted(losses(tmp_path, "x")) == [1, 2]
