"""A step submitted while the previous one runs: in order, separate, and failing like one that was waited for."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest

from nxd_infer.errors import (
    BucketError,
    InputMismatchError,
    ModelClosedError,
    RankFailedError,
    StepsPendingError,
)
from nxd_infer.runtime.ipc import InputBlock
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.model import TensorParallelModel
from nxd_infer.runtime.rank_model import RankModel
from tests.support import toy_artifacts as toy
from tests.support.needs import needs_native
from tests.support.runtime.rank_processes import interrupt_the_wait, raising

WEIGHTS = toy.logical_weights()


def inputs(number: int, ids: int | None = None) -> dict[str, np.ndarray]:
    x = np.random.default_rng(number).standard_normal((2, 4, toy.HIDDEN)).astype("f4")
    return {"x": x, "ids": np.full(2, number % toy.VOCABULARY if ids is None else ids)}


def expected(given: dict[str, np.ndarray], weights=WEIGHTS) -> np.ndarray:
    table = weights["table"].numpy()[given["ids"]][:, None]
    return given["x"] @ weights["up"].numpy() @ weights["down"].numpy() + table


@pytest.mark.parametrize("blocks", [False, True])
def test_steps_run_in_order_with_inputs_of_the_moment_they_were_begun(model, blocks):
    """The state counts them. Arrays may be changed as soon as a step is begun, its outputs outlive the next one."""
    block = InputBlock(model.buckets[0])
    begun, results, wants = [], [], []
    for number in range(20):
        given = inputs(number)
        wants.append(expected(given))
        if blocks:
            for name, array in given.items():
                block[name][...] = array
            given = block
        begun.append(model.begin_bucket("b2_s4", given))
        for name in ("x", "ids"):
            given[name][...] = 0
        if len(begun) == 2:
            results.append(begun.pop(0).result())
    results.append(begun.pop().result())
    assert [result["count"].item() for result in results] == list(range(1, 21))
    for result, want in zip(results, wants, strict=True):
        np.testing.assert_allclose(result["y"], want, rtol=1e-5, atol=1e-5)


def test_a_third_is_refused_and_a_dropped_one_makes_room(model):
    first = model.begin_bucket("b2_s4", inputs(0))
    second = model.begin_bucket("b2_s4", inputs(1))
    for call in (model.begin_bucket, model.run_bucket):
        with pytest.raises(StepsPendingError, match="take the result of one of them first"):
            call("b2_s4", inputs(2))
    del first
    assert model.run_bucket("b2_s4", inputs(2))["count"].item() == 3
    assert second.result()["count"].item() == 2
    with pytest.raises(StepsPendingError, match="outputs were taken"):
        second.result()


def test_bad_inputs_begin_nothing(model):
    with pytest.raises(BucketError):
        model.begin_bucket("b9", inputs(0))
    with pytest.raises(InputMismatchError):
        model.begin_bucket("b2_s4", {"x": np.zeros((1, 4, toy.HIDDEN), "f4")})
    with pytest.raises(InputMismatchError, match="bucket 'b2_s4' takes"):  # a block of another bucket
        model.begin_bucket("b2_s4", InputBlock(model.buckets[2]))
    with pytest.raises(InputMismatchError):  # the word of whoever calls counts for a block of the bucket alone
        model.begin_bucket("b2_s4", InputBlock(model.buckets[2]), checked=True)
    assert model.run_bucket("b2_s4", inputs(0))["count"].item() == 1


def test_everything_else_waits_for_steps_that_were_begun(model):
    """Results are there afterwards: of the old weights, and before the states were reset."""
    new = toy.logical_weights(seed=5)
    begun = [model.begin_bucket("b2_s4", inputs(number)) for number in range(2)]
    model.update_weights(new)
    try:
        results = [step.result() for step in begun]
        np.testing.assert_allclose(results[1]["y"], expected(inputs(1)), rtol=1e-5, atol=1e-5)
        last = model.begin_bucket("b2_s4", inputs(7))
        model.reset_states()
        result = last.result()
        np.testing.assert_allclose(result["y"], expected(inputs(7), new), rtol=1e-5, atol=1e-5)
        assert result["count"].item() == 3
        assert model.run_bucket("b2_s4", inputs(0))["count"].item() == 1
    finally:
        model.update_weights(WEIGHTS)  # the next test's


def test_a_model_in_this_process_begins_nothing_ahead(artifacts):
    with (
        TensorParallelModel(load_artifact(artifacts[1])) as model,
        pytest.raises(InputMismatchError, match="call run_bucket"),
    ):
        model.begin_bucket("b2_s4", inputs(0))


def test_a_step_that_raises_ends_the_one_behind_it(model):
    bad, good = model.begin_bucket("b2_s4", inputs(0, ids=99)), model.begin_bucket("b2_s4", inputs(1))
    with pytest.raises(RankFailedError, match="raised during step"):
        bad.result()
    with pytest.raises(ModelClosedError, match="raised during step"):
        good.result()
    model.restart()
    assert model.run_bucket("b2_s4", inputs(0))["count"].item() == 1


@pytest.mark.parametrize(("rank", "second"), [(0, "b2_s8"), (1, "b2_s4")])
def test_a_rank_that_raised_goes_on_to_no_step_that_the_others_may_not_have_reached(tmp_path, rank, second):
    """It would meet them in the first step's collective, and their error would be reported instead."""
    path = toy.build(tmp_path / "artifact", shifts={rank: 50})
    with RankModel(load_artifact(path), start_timeout=600, call_timeout=60) as model:
        steps = [model.begin_bucket("b2_s4", inputs(0))]
        x = np.zeros((2, 4 if second == "b2_s4" else 8, toy.HIDDEN), "f4")
        steps.append(model.begin_bucket(second, {"x": x, "ids": np.full(2, -50)}))
        with pytest.raises(RankFailedError, match=f"(?s)rank {rank} of 2 raised during step.*out of range"):
            steps[0].result()


def test_a_wait_that_was_interrupted_gives_nobody_elses_outputs(model):
    """A signal handler raises while the step runs; its place is used again only when the ranks have left it."""
    os.kill(model.health()[0].pid, signal.SIGSTOP)
    step = model.begin_bucket("b2_s4", inputs(0))
    with pytest.raises(KeyboardInterrupt), raising(signal.SIGALRM):
        interrupt_the_wait(signal.SIGALRM)
        step.result()
    with pytest.raises(StepsPendingError, match="a wait for them was interrupted"):
        step.result()
    threading.Timer(0.3, os.kill, (model.health()[0].pid, signal.SIGCONT)).start()
    # Its x would lie where the stopped rank still has to read the ids of the first step.
    assert model.run_bucket("b2_s8", {"x": np.ones((2, 8, toy.HIDDEN), "f4")})["count"].item() == 2
    result = model.run_bucket("b2_s4", inputs(3))
    np.testing.assert_allclose(result["y"], expected(inputs(3)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", [pytest.param("shared memory", marks=needs_native), "gloo"])
def test_ranks_that_share_memory_need_no_directory_that_a_killed_caller_would_leave(path, tmp_path, monkeypatch, way):
    """They need one where they find each other through a file, and it goes when they end."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("NXD_INFER_PIN", "0")  # processes that keep to cores note them there
    if way == "gloo":
        monkeypatch.setattr("nxd_infer.runtime.supervisor.rank_processes._libraries", lambda artifact: [])
    with RankModel(load_artifact(path), start_timeout=600) as model:
        found = model.run_bucket("b2_s4", inputs(0))
        np.testing.assert_allclose(found["y"], expected(inputs(0)), rtol=1e-5, atol=1e-5)
        assert len(list(tmp_path.iterdir())) == (way == "gloo")
    assert not list(tmp_path.iterdir())
