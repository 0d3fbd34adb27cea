"""Losses under a Trainer are those of a plain loop, at any degree and with every option."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning")

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


@pytest.mark.parametrize(("ranks", "jobs"), [(2, JOBS), (4, JOBS_OF_FOUR)], ids=["two", "four"])
def test_several_ranks_are_the_plain_loop(ranks: int, jobs: dict[str, tuple[int, dict[str, Any]]]):
    expected = plain(4)
    for found in run_ranks(all_jobs, ranks, jobs):
        for name, diary in found.items():
            assert diary["losses"] == pytest.approx(expected, rel=1e-6), name
