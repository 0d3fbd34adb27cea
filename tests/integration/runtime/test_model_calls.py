"""Calling a traced model: results, buckets, states, threads, and new weights."""

from __future__ import annotations

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nxd_infer.errors import (
    BucketError,
    InputMismatchError,
    ModelClosedError,
    RankFailedError,
    WeightSchemaError,
)
from nxd_infer.runtime.model import parallel_model_load
from tests.support import toy_artifacts as toy
from tests.support.needs import HAS_NATIVE
from tests.support.processes import gone

WEIGHTS = toy.logical_weights()


@pytest.fixture(scope="module", params=["tp1 in process", "tp1", "tp4"])
def model(request, artifacts):
    degree = int(request.param[2])
    with parallel_model_load(
        artifacts[degree], in_process="in process" in request.param, call_timeout=60, start_timeout=600
    ) as model:
        yield model


@pytest.mark.smoke
def test_every_bucket_computes_what_the_plain_model_does(model):
    for batch, length in ((1, 1), (2, 4), (1, 5), (2, 8), (3, 3), (4, 8)):
        x = torch.randn(batch, length, toy.HIDDEN)
        ids = torch.randint(0, toy.VOCABULARY, (batch,))
        assert toy.close_to(model(ids=ids, x=x)["y"], toy.expected(WEIGHTS, x, ids))
        assert toy.close_to(model(x)["y"], toy.expected(WEIGHTS, x))


def test_strides_and_gradients_of_inputs_do_not_matter(model):
    x = torch.randn(8, 4, toy.HIDDEN)
    strided = x.transpose(0, 1)[::2]  # [2, 8, H], neither contiguous nor dense
    assert toy.close_to(model(strided)["y"], toy.expected(WEIGHTS, strided))
    needs_grad = torch.randn(2, 4, toy.HIDDEN, requires_grad=True)
    y = model(needs_grad)["y"]
    assert not y.requires_grad
    assert toy.close_to(y, toy.expected(WEIGHTS, needs_grad.detach()))
    expanded = torch.randn(1, 4, 1).expand(2, 4, toy.HIDDEN)
    assert toy.close_to(model(expanded)["y"], toy.expected(WEIGHTS, expanded))


def test_a_result_belongs_to_its_caller(model):
    x = torch.randn(2, 4, toy.HIDDEN)
    first = model(x)
    kept = first["y"].clone()
    model(torch.randn(2, 4, toy.HIDDEN))
    assert torch.equal(first["y"], kept)
    first["y"].zero_()
    first["memory"].zero_()
    assert toy.close_to(model(x)["y"], toy.expected(WEIGHTS, x))
    assert model(x)["memory"].min() > 0


@pytest.mark.smoke
def test_states_are_shared_by_all_buckets_and_can_be_reset(model):
    model.reset_states()
    shapes = ((2, 4), (2, 8), (4, 8), (1, 1))
    for step, (batch, length) in enumerate(shapes, 1):
        out = model(torch.zeros(batch, length, toy.HIDDEN))
        assert out["count"].item() == step
        assert out["memory"].tolist() == [1.0 + step, 2.0 + step, 3.0 + step]
    model.reset_states()
    assert model(torch.zeros(1, 1, toy.HIDDEN))["count"].item() == 1


def test_what_does_not_fit_is_refused_and_the_model_goes_on(model):
    x = torch.randn(4, 8, toy.HIDDEN)
    out = model.run_bucket("b4_s8", {"x": x})
    assert list(out) == ["y", "count", "memory"] and toy.close_to(out["y"], toy.expected(WEIGHTS, x))
    steps = model.health()[0].steps
    with pytest.raises(InputMismatchError, match=r"'x' has shape \[2, 8, 8\], bucket 'b4_s8' takes \[4, 8, 8\]"):
        model.run_bucket("b4_s8", {"x": x[:2]})
    with pytest.raises(BucketError, match=r"no bucket 'b9'[^$]*b2_s4  x: float32\[<=2, <=4, 8\]"):
        model.run_bucket("b9", {"x": x})
    with pytest.raises(BucketError, match=r"no bucket fits x: float32\[5, 8, 8\]") as caught:
        model(torch.zeros(5, 8, toy.HIDDEN))
    assert "\n  b4_s8  x: float32[<=4, <=8, 8], ids: int64[<=4]" in str(caught.value)
    with pytest.raises(InputMismatchError, match=r"'x' is float64\[2, 4, 8\], expected float32\[<=2, <=4, 8\]"):
        model(torch.zeros(2, 4, toy.HIDDEN).double())
    for timeout in (0, -1.0, float("nan")):
        with pytest.raises(InputMismatchError, match="timeout"):
            model.run_bucket("b4_s8", {"x": x}, timeout=timeout)
    assert model.health()[0].steps == steps  # none of it reached a rank


def test_health_counts(model):
    before = model.health()
    for _ in range(3):
        model(torch.zeros(1, 1, toy.HIDDEN))
    counted = model.tp_degree > 1 and HAS_NATIVE  # gloo counts none
    for old, new in zip(before, model.health(), strict=True):
        assert new.alive and new.state == "running" and new.pid == old.pid
        assert new.steps == old.steps + 3 and new.collectives == old.collectives + 3 * counted
        assert new.busy_seconds == 0.0 and new.last_step_age is not None


def test_warmup_runs_every_bucket_and_leaves_no_trace(model):
    seconds = model.warmup()
    assert list(seconds) == ["b2_s4", "b2_s8", "b4_s8"]
    assert all(value > 0 for value in seconds.values())
    assert model(torch.zeros(1, 1, toy.HIDDEN))["count"].item() == 1


def test_threads_start_the_ranks_once_and_each_gets_its_own_results(artifacts):
    """8 threads of 25 calls; every input is its own, and every result is checked against it."""
    model = parallel_model_load(artifacts[2], call_timeout=60, start_timeout=600)
    assert model.health() == []
    zeros = torch.zeros(1, 1, toy.HIDDEN)
    with ThreadPoolExecutor(4) as pool:
        counts = [out["count"].item() for out in pool.map(model, [zeros] * 4)]
    assert sorted(counts) == [1, 2, 3, 4]
    barrier = threading.Barrier(8)

    def caller(number: int) -> int:
        generator = torch.Generator().manual_seed(number)
        barrier.wait(60)
        for _ in range(25):
            batch = int(torch.randint(1, 5, (), generator=generator))
            length = int(torch.randint(1, 9, (), generator=generator))
            x = torch.randn(batch, length, toy.HIDDEN, generator=generator)
            ids = torch.randint(0, toy.VOCABULARY, (batch,), generator=generator)
            assert toy.close_to(model(x, ids)["y"], toy.expected(WEIGHTS, x, ids))
        return 25

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(caller, range(8), timeout=600)) == 200
    assert model(zeros)["count"].item() == 205  # each ran exactly once
    assert [rank.steps for rank in model.health()] == [205, 205]
    model.close()


def test_ranks_say_who_they_are_and_end_with_the_model(artifacts):
    model = parallel_model_load(artifacts[2], call_timeout=60, start_timeout=600)
    model.start()
    pids = [rank.pid for rank in model.health()]
    for rank, pid in enumerate(pids):
        assert f"rank {rank}" in Path(f"/proc/{pid}/comm").read_text()  # as ps and top show it
        assert os.getsid(pid) == pid  # Ctrl-C at the terminal does not reach it
    model.close()
    assert all(gone(pid, 60) for pid in pids)
    with pytest.raises(ModelClosedError, match=r"was closed; call restart\(\)"):
        model(torch.zeros(1, 1, toy.HIDDEN))
    model.close()
    model.restart()
    assert model(torch.zeros(1, 1, toy.HIDDEN))["count"].item() == 1
    pids = [rank.pid for rank in model.health()]
    del model
    gc.collect()
    assert all(gone(pid, 60) for pid in pids)


@pytest.mark.parametrize("where", ["here", "processes"])
def test_a_users_kernel_chooses_the_bucket(tmp_path, monkeypatch, where):
    def kernel(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        x = tensors[0]
        short = 8 - x.shape[1]
        return [torch.cat([x, torch.ones([x.shape[0], short, x.shape[2]])], 1)], torch.tensor([1])

    path = toy.build(tmp_path / "kernel", degree=2 if where == "processes" else 1, kernel=kernel)
    if where != "here":  # it is code, and runs where the artifact's code does
        monkeypatch.setattr(torch.jit, "load", lambda *_: pytest.fail("the caller has loaded the kernel"))
    with parallel_model_load(path, in_process=where == "here") as model:
        x = torch.randn(2, 3, toy.HIDDEN)
        y = model(x)["y"]  # a kernel's padding is its own: nothing is cut
        assert toy.close_to(y, toy.expected(WEIGHTS, torch.cat([x, torch.ones(2, 5, toy.HIDDEN)], 1)))
        with pytest.raises(BucketError, match="the bucket kernel raised"):
            model(torch.randn(2, 9, toy.HIDDEN))
        assert toy.close_to(model(x)["y"], y)  # which ends no rank


# --- new weights ----------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_new_weights_are_swapped_in_place(model, tmp_path):
    x = torch.randn(2, 4, toy.HIDDEN)
    model.reset_states()
    model(x)
    new = toy.logical_weights(7)
    pids = [rank.pid for rank in model.health()]
    model.update_weights(new)
    out = model(x)
    assert toy.close_to(out["y"], toy.expected(new, x))
    assert out["count"].item() == 2  # states stay
    assert [rank.pid for rank in model.health()] == pids
    save_file(toy.logical_weights(8), tmp_path / "model.safetensors")
    model.update_weights(tmp_path)
    assert toy.close_to(model(x)["y"], toy.expected(toy.logical_weights(8), x))
    model.update_weights({"table": WEIGHTS["table"].double()}, strict=False)
    mixed = {**toy.logical_weights(8), "table": WEIGHTS["table"]}
    assert toy.close_to(model(x)["y"], toy.expected(mixed, x))
    model.restart()
    assert toy.close_to(model(x)["y"], toy.expected(mixed, x))  # a restart keeps them
    model.update_weights(WEIGHTS)
    assert toy.close_to(model(x)["y"], toy.expected(WEIGHTS, x))


def test_weights_that_do_not_fit_change_nothing(model):
    x = torch.randn(2, 4, toy.HIDDEN)
    bad = {**WEIGHTS, "up": torch.zeros(3, 3), "lora": torch.zeros(1), "table": WEIGHTS["table"].long()}
    del bad["down"]
    with pytest.raises(WeightSchemaError) as caught:
        model.update_weights(bad)
    told = ("missing: down", "up has shape [3, 3], traced with [8, 16]", "table is torch.int64", "unexpected: lora")
    assert all(part in str(caught.value) for part in told)
    with pytest.raises(WeightSchemaError):
        model.update_weights({})
    assert toy.close_to(model(x)["y"], toy.expected(WEIGHTS, x))


def test_an_error_in_process_is_typed_and_a_closed_model_starts_again(artifacts):
    model = parallel_model_load(artifacts[1])
    assert model.in_process
    x = torch.zeros(1, 1, toy.HIDDEN)
    with pytest.raises(RankFailedError, match="index out of range") as caught:
        model(x, torch.tensor([99]))
    assert "Traceback" in caught.value.remote_traceback
    with pytest.raises(ModelClosedError, match=r"index out of range.*restart\(\)"):
        model(x)
    assert model.restart()(x)["count"].item() == 1
    model.close()
    with pytest.raises(ModelClosedError):
        model(x)
    assert model.restart()(x)["count"].item() == 1
