"""New weights for a model that others call meanwhile, that is saved afterwards, or that gets them piece by piece."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nxd_infer.errors import WeightSchemaError
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.model import parallel_model_load, parallel_model_save
from tests.support import toy_artifacts as toy
from tests.support.processes import wait_until

WEIGHTS = toy.logical_weights()


def test_saving_while_others_swap_saves_the_weights_of_one_moment(artifacts, tmp_path, monkeypatch):
    x = torch.randn(2, 4, toy.HIDDEN)
    old, new = toy.logical_weights(1), toy.logical_weights(2)
    with parallel_model_load(artifacts[2]) as model, ThreadPoolExecutor(1) as pool:
        model.update_weights(old)
        take, saver = model._lock.take, threading.get_ident()
        taken: list[int] = []

        def take_after_another_swap():
            """Let others swap wherever the save has released the model."""
            if threading.get_ident() == saver and len(taken) == 1:
                pool.submit(model.update_weights, new).result(120)
            taken.append(threading.get_ident())
            return take()

        monkeypatch.setattr(model._lock, "take", take_after_another_swap)
        parallel_model_save(model, tmp_path / "saved")
    with parallel_model_load(tmp_path / "saved") as saved:
        y = saved(x)["y"]
    assert any(toy.close_to(y, toy.expected(weights, x)) for weights in (old, new)), "a mixture of weights"


def test_inlined_weights_are_not_swapped(tmp_path):
    def inline(manifest):
        manifest.requires = ["inline-weights"]

    model = parallel_model_load(toy.build(tmp_path / "inline", degree=1, change=inline))
    with pytest.raises(WeightSchemaError, match="inline_weights_to_neff=False"):
        model.update_weights(WEIGHTS)


def test_swapping_between_the_calls_of_other_threads(model):
    """Every result is that of the old weights or of the new ones, never of a mixture."""
    x = torch.randn(2, 4, toy.HIDDEN)
    choices = [toy.logical_weights(seed) for seed in range(3)]
    wanted = [toy.expected(weights, x) for weights in choices]
    stop = threading.Event()
    swaps = 0
    seen: set[tuple[int, int]] = set()
    """Swaps that were over before a call, and the weights of its result."""

    def caller() -> None:
        while not stop.is_set():
            over, y = swaps, model(x)["y"]
            matches = [i for i, want in enumerate(wanted) if toy.close_to(y, want)]
            assert matches, "a mixture of weights"
            seen.update((over, match) for match in matches)

    with ThreadPoolExecutor(3) as pool:
        callers = [pool.submit(caller) for _ in range(3)]
        for number in (1, 2, 0):
            model.update_weights(choices[number])
            assert toy.close_to(model(x)["y"], wanted[number])
            swaps += 1
            wait_until(lambda of=(swaps, number): of in seen)
        stop.set()
        for each in callers:
            each.result(60)
    assert {match for over, match in seen if over == swaps} == {0}


def test_swapping_a_part_of_the_weights_again_and_again_keeps_one_file_which_is_saved(artifacts, tmp_path):
    with parallel_model_load(artifacts[1]) as model:
        counts = []
        for seed in range(1, 6):
            model.update_weights({"table": toy.logical_weights(seed)["table"]}, strict=False)
            counts.append(len(os.listdir("/proc/self/fd")))
        model.update_weights({"up": toy.logical_weights(7)["up"]}, strict=False)
        model(torch.zeros(1, 1, toy.HIDDEN))
        assert len(set(counts)) == 1
        parallel_model_save(model, tmp_path / "saved")
    x = torch.randn(2, 4, toy.HIDDEN)
    assert load_artifact(artifacts[1]).digest != load_artifact(tmp_path / "saved").digest
    want = {**toy.logical_weights(), "table": toy.logical_weights(5)["table"], "up": toy.logical_weights(7)["up"]}
    with parallel_model_load(tmp_path / "saved") as model:
        out = model(x)
    torch.testing.assert_close(out["y"], toy.expected(want, x))
    assert out["memory"].tolist() == [2.0, 3.0, 4.0], "states are saved as traced"
