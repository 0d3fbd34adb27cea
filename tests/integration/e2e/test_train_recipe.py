"""A recipe from the command line: trained, killed, resumed, traced, asked; under a launcher; with a rank that fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nxd_infer.recipes import launch
from nxd_infer.util.ports import free_port
from tests.support.e2e.command import here, refused
from tests.support.processes import wait_until

RECIPE = """name: killed
trainer: {devices: 2, max_steps: 12, log_every_n_steps: 1, enable_progress_bar: false}
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
  num_layers: 1
  hidden_size: 32
  ffn_hidden_size: 64
  num_attention_heads: 4
  num_kv_heads: 2
  optim: {lr: 1e-3, sched: {name: CosineAnnealing, warmup_steps: 2}}
precision: {type: fp32}
trace: {max_len: 64, prompt_buckets: [16], batch_sizes: [1], tp_degree: 1, backend: eager}
"""


def started(folder: Path, which: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """``nxd-infer train`` in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "nxd_infer.cli.main", "train", "recipe.yaml", *arguments],
        cwd=folder,
        env={**os.environ, "WHICH": which, "OMP_NUM_THREADS": "1", **environment},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def losses(folder: Path, which: str) -> dict[int, float]:
    """The loss of each step, as TensorBoard shows it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "experiments" / which / "version_0"), size_guidance={"scalars": 0})
    events.Reload()
    return {event.step: event.value for event in events.Scalars("loss")}


@pytest.mark.smoke
def test_killed_resumed_traced_and_asked(tmp_path):
    """It ends as the same job does that is left alone: one that Slurm starts."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    slurm = {"SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [{**slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    for job in [started(tmp_path, "whole", "~trace", **rank) for rank in ranks]:
        out, _ = job.communicate(timeout=600)
        assert job.returncode == 0, out
    undisturbed = losses(tmp_path, "whole")
    assert sorted(undisturbed) == list(range(1, 13))

    killed = started(tmp_path, "killed", "~trace")
    checkpoints = tmp_path / "experiments/killed/version_0/checkpoints"
    wait_until(lambda: list(checkpoints.glob("*/done")) or killed.poll() is not None, 600)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=60)
    # The same command again, and its trace.
    resumed = started(tmp_path, "killed", "trainer.enable_progress_bar=true", "--trace", "artifact")
    out, _ = resumed.communicate(timeout=600)
    assert resumed.returncode == 0, out
    if "nothing to do: trainer.max_steps = 12 is reached" not in out:  # it was almost done
        assert "going on at step " in out
        assert "step 12/12" in out  # the user sees the first rank's progress; its errors are in the log
    assert losses(tmp_path, "killed") == undisturbed
    tags = sorted(path.name for path in checkpoints.iterdir())
    assert tags == ["step=12-consumed_samples=24", "step=8-consumed_samples=16"]
    # What was trained answers.
    done = here("generate", tmp_path / "artifact", "The statement", "--max-tokens", 8, "--json")
    assert done.status == 0 and json.loads(done.out)["tokens"] >= 1, done


FAILING = """import os, sys, time
from nxd_infer.checkpoint import async_save
from nxd_infer.errors import RecipeError
from nxd_infer.recipes import launch, loop

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
launch.main(*sys.argv[1:])
"""


def test_one_rank_that_fails_in_a_step_ends_the_job_at_once(tmp_path, monkeypatch):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "rank.py").write_text(FAILING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHICH", "x")
    monkeypatch.setattr(launch, "python_module", lambda _, *words: [sys.executable, "rank.py", *words])
    refused(here("train", "recipe.yaml", "~trace"), "ranks.log", "the data's disk is gone")
    (log,) = (tmp_path / "experiments/x").glob("**/ranks.log")
    late = [line for line in log.read_text().splitlines() if "did not reach" in line]
    assert all("it has left the group" in line for line in late), late  # its peer would wait for 300 s
    (saved,) = (tmp_path / "experiments/x").glob("version_0/checkpoints/*")
    assert saved.name.startswith("step=4-") and (saved / "done").is_file()  # what was being written then is kept
