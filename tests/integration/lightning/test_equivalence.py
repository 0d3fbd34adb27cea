"""Losses under a Trainer are those of a plain loop, at any degree; a resumed job goes on bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from nxd_infer import parallel_state
from tests.support.lightning.jobs import fit, plain
from tests.support.ranks import run_ranks
from tests.support.seeds.degrees import alone

ZERO1 = {"optimizer_config": {"zero_one_enabled": True, "bucket_cap_mb": 0.01}}


def test_one_rank_is_the_plain_loop():
    found = alone(fit, 2, {"accumulate": 2})
    assert found["losses"] == pytest.approx(plain(4, accumulate=2), rel=1e-6)


PIPELINE: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    "pipeline_config": {"auto_partition": True, "num_microbatches": 2},
}
JOBS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp, ZeRO-1, accumulated": (1, {"accumulate": 2, **ZERO1}),
    "tp, sequence parallel": (4, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "pp": (4, {**PIPELINE, "trainer": {"enable_model_summary": True, "max_steps": 8, "max_epochs": -1}}),
}
JOBS_OF_FOUR: dict[str, tuple[int, dict[str, Any]]] = {
    "tp x pp, sequence parallel": (4, {**PIPELINE, "tensor_parallel_size": 2, "sequence_parallel": True}),
    "dp x pp, ZeRO-1": (2, {**PIPELINE, **ZERO1}),
    "dp x tp": (2, {"tensor_parallel_size": 2}),
}


def all_jobs(jobs: dict[str, tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """One after the other, in one set of processes."""
    parallel_state.destroy_model_parallel()
    return {name: alone(fit, rows, job) for name, (rows, job) in jobs.items()}


@pytest.mark.smoke
@pytest.mark.parametrize(("ranks", "jobs"), [(2, JOBS), (4, JOBS_OF_FOUR)], ids=["two", "four"])
def test_several_ranks_are_the_plain_loop(ranks: int, jobs: dict[str, tuple[int, dict[str, Any]]]):
    expected = plain(4)
    for found in run_ranks(all_jobs, ranks, jobs):
        for name, diary in found.items():
            assert diary["losses"] == pytest.approx(expected, rel=1e-6), name


class Dropped(nn.Module):
    """Draws random numbers in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(61, 8), nn.Dropout(0.5), nn.Linear(8, 61))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(input_ids).flatten(0, 1), labels.flatten())


RESUMED: dict[str, dict[str, Any]] = {
    "dp, ZeRO-1, dropout": {"model_fn": Dropped, "optimizer_config": {"zero_one_enabled": True}},
    "dp, accumulated, by steps": {"model_fn": Dropped, "accumulate": 2, "trainer": {"max_steps": 4, "max_epochs": -1}},
    "tp": {"tensor_parallel_size": 2},
    "tp, an adapter": {
        "tensor_parallel_size": 2,
        "lora_config": {"enable_lora": True, "lora_rank": 2, "target_modules": ["q_proj", "down_proj"]},
    },
    "pp": {"pipeline_parallel_size": 2, "pipeline_config": {"auto_partition": True, "num_microbatches": 2}},
}


def run(root: str, job: dict[str, Any], resume: str | None = None) -> dict[str, Any]:
    """A job that saves after each step and each epoch. Where all weights are in its checkpoint, they count."""
    steps = ModelCheckpoint(root, "{step}", every_n_train_steps=1, save_top_k=-1)
    epochs = ModelCheckpoint(root, "end-{step}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True)
    seed = 0 if resume is None or "lora_config" in job else 99
    saving = {"shuffle": True, **job, "trainer": {"enable_checkpointing": True, **job.get("trainer", {})}}
    return fit(2, saving, steps, epochs, seed=seed + 10 * parallel_state.get_data_parallel_rank(), resume=resume)


def resumed_jobs(root: str) -> list[str]:
    """What differs between jobs that were resumed and the undisturbed ones."""
    parallel_state.destroy_model_parallel()
    wrong = []
    for name, job in RESUMED.items():
        folder = f"{root}/{name}"
        whole = alone(run, folder, job)
        steps, batches = len(whole["losses"]), len(whole["rows"])
        middle = steps // 2
        for tag in (f"step={middle - 1}", f"end-step={middle}"):
            rest = alone(run, f"{folder}/again", job, f"{folder}/{tag}.ckpt")
            step = int(tag.partition("=")[2])
            done = step * batches // steps
            if rest["rows"] != whole["rows"][done:] or rest["losses"] != whole["losses"][step:]:
                wrong.append(f"{name}, {tag}: {rest['rows']} {rest['losses']}, not {whole['rows']} {whole['losses']}")
            if any(not torch.equal(rest["weights"][key], value) for key, value in whole["weights"].items()):
                wrong.append(f"{name}, {tag}: other weights")
            if rest["rates"] != whole["rates"] or rest["at"] != whole["at"]:
                wrong.append(f"{name}, {tag}: {rest['rates']} {rest['at']}, not {whole['rates']} {whole['at']}")
    return wrong


def test_a_resumed_job_goes_on_bit_for_bit(tmp_path: Path):
    """Within an epoch and at its end, from the very next rows, on every rank."""
    assert run_ranks(resumed_jobs, 2, str(tmp_path)) == [[], []]
    assert (tmp_path / "tp, an adapter/end-step=8.ckpt/lora_adapter/adapter_config.json").exists()
