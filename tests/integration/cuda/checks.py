"""Training on GPUs: `make test-cuda`, which `make test` leaves out. One GPU is enough, however many ranks there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.cuda import jobs
from tests.integration.cuda.ranks import ONE_GPU, call, launch
from tests.integration.lightning import test_equivalence as lightning
from tests.support.lightning.jobs import plain
from tests.support.recipes.jobs import write, write_pairs
from tests.support.tiny_models import write_tiny

NEAR = 2e-5
"""Of losses in float32, relative."""


def none_differ(found: list[list[str]]) -> None:
    for rank, lines in enumerate(found):
        assert not lines, f"rank {rank}: {len(lines)}\n" + "\n".join(lines[:12])


@pytest.mark.parametrize("degrees", [[(1, 1)], [(1, 2), (2, 1)], [(2, 2), (4, 1)]], ids=["1", "2", "4"])
def test_layers_train_as_plain_pytorch(degrees: list[tuple[int, int]]) -> None:
    """Losses, gradients, norms and weights, with and without sequence parallelism, ZeRO-1 and recomputation."""
    none_differ(call(jobs.layers, degrees[0][0] * degrees[0][1], degrees))


@pytest.mark.parametrize("degrees", [(1, 2, 1), (2, 2, 1), (1, 2, 2)], ids=lambda way: "tp{}pp{}dp{}".format(*way))
def test_stages_train_as_plain_pytorch(degrees: tuple[int, int, int]) -> None:
    none_differ(call(jobs.stages, degrees[0] * degrees[1] * degrees[2], degrees))


def test_recomputation_draws_the_same_dropout() -> None:
    (*kept, one), (*of_peer, other) = call(jobs.dropout, 2, False)
    assert kept == of_peer and len(set(kept)) == len(kept)
    assert one != other  # where each rank has a part of its own
    again = call(jobs.dropout, 2, True)
    assert again[0][:-1] == pytest.approx(kept, rel=NEAR) and again[0][-1] == one


def test_dropout_is_the_same_at_any_number_of_stages() -> None:
    (*one, _), (*of_peer, other) = two = call(jobs.stages_drop, 2, 2, 1)
    assert one == of_peer and len(set(one)) == 2
    assert two[0][-1] != other, "ranks keep generators of their own"
    for stages, chunks in ((2, 2), (4, 1)):
        for *found, _ in call(jobs.stages_drop, stages, stages, chunks):
            assert found == pytest.approx(one, rel=NEAR)


@pytest.mark.parametrize("seeded_apart", [False, True])
def test_ranks_build_parts_of_one_model(seeded_apart: bool) -> None:
    """Wherever its weights are drawn, and whatever the seeds of the ranks are."""
    one, other = call(jobs.built, 2, seeded_apart)
    for place in ("host", "meta", "gpu"):
        assert one[place] == other[place]
        assert (one[f"after {place}"] == other[f"after {place}"]) is not seeded_apart
    assert one["host"] == one["meta"]


@pytest.mark.parametrize("halves", [False, True], ids=["float32", "bfloat16"])
def test_a_job_goes_on_from_its_checkpoint(halves: bool, tmp_path: Path) -> None:
    """On GPUs it is as if it had never ended; the CPU can take it over, and hand it back."""
    *whole, device = call(jobs.trained, 2, str(tmp_path / "whole"), 0, 6, halves)[0]
    assert device == "cuda"
    folder = str(tmp_path / "parts")
    first = call(jobs.trained, 2, folder, 0, 2, halves)[0]
    then = call(jobs.trained, 2, folder, 2, 4, halves)[0]
    assert first[:-1] + then[:-1] == whole[:4]
    on_cpu = call(jobs.trained, 2, folder, 4, 5, halves, gpu=False)[0]
    back = call(jobs.trained, 2, folder, 5, 6, halves)[0]
    assert (on_cpu[-1], back[-1]) == ("cpu", "cuda")
    assert [on_cpu[0], back[0]] == pytest.approx(whole[4:], rel=2e-2 if halves else NEAR)


def test_models_of_transformers_equal_the_whole_ones() -> None:
    pytest.importorskip("transformers")
    none_differ(call(jobs.hugging_face, 2))


def test_a_recipe_of_one_rank_trains_on_the_gpu(tmp_path: Path) -> None:
    """By the command, which starts the rank; the weights are those that the CPU trains."""
    write_tiny("llama", tmp_path / "model")
    write_pairs(tmp_path)
    weights = {}
    for gpu in (True, False):
        name = f"gpu{gpu}"
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ONE_GPU["CUDA_VISIBLE_DEVICES"] if gpu else ""}
        options = [f"exp_manager.exp_dir={tmp_path / name}", "exp_manager.create_checkpoint_callback=true"]
        command = [sys.executable, "-m", "nxd_infer", "train", str(write(tmp_path)), *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        (written,) = (tmp_path / name).rglob("model.tp_rank_00.pp_rank_00.safetensors")
        weights[gpu] = load_file(written)
    assert all(torch.allclose(weights[True][key], value, atol=1e-4) for key, value in weights[False].items())


def test_a_trainer_of_lightning_trains_as_the_plain_loop() -> None:
    pytest.importorskip("lightning")
    for found in call(jobs.lightning, 2, lightning.JOBS):
        for name, losses in found.items():
            assert losses == pytest.approx(plain(4), rel=NEAR), name


def test_a_rank_is_not_left_waiting_for_a_lost_one(tmp_path: Path) -> None:
    """It is told by an exception, or ended by NCCL's own watchdog, which takes about a minute."""
    told = tmp_path / "told"
    program = f"from tests.integration.cuda.jobs import lose_a_peer; lose_a_peer({str(told)!r})"
    for said in launch([sys.executable, "-c", program], 2, fails=True):
        assert "the ranks have met" in said
    if told.exists():
        assert "did not reach all_reduce" in json.loads(told.read_text())


def test_the_gpu_is_there() -> None:
    """Else every test above would have trained on the CPU."""
    assert launch([sys.executable, "-c", "import torch; print(torch.cuda.device_count())"], 1) == ["1\n"]
