"""Ranks that die, stop, raise or never start, and callers that do: typed errors in time, and no orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from nxd_infer.errors import (
    ArtifactCorruptError,
    ModelClosedError,
    RankDiedError,
    RankFailedError,
    RankTimeoutError,
    WeightSchemaError,
)
from nxd_infer.runtime.ipc.channel import Channel
from nxd_infer.runtime.model import TensorParallelModel
from nxd_infer.runtime.save_load import parallel_model_load
from nxd_infer.runtime.updates import swap
from tests.support import toy_artifacts as toy
from tests.support.processes import gone, wait_until
from tests.support.runtime.rank_processes import (
    LIMIT,
    TIMEOUT,
    X,
    call_in_thread,
    interrupt_the_wait,
    pids_of,
    until_busy,
    until_stopped,
)
from tests.support.runtime.rank_processes import started as start


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return toy.build(tmp_path_factory.mktemp("faults") / "artifact")


@pytest.fixture(scope="module")
def shared(path) -> Iterator[TensorParallelModel]:
    with start(path) as model:
        yield model


@pytest.fixture
def model(shared) -> TensorParallelModel:
    """``shared``, with states as traced; ranks that the test before has ended are started again."""
    if all(rank.alive for rank in shared.health()):
        shared.reset_states()
    else:
        shared.restart()
    return shared


def assert_closed(model: TensorParallelModel, pids: list[int], reason: str, *, restart: bool = False) -> None:
    """All ranks are gone, later calls say why, and a restart brings the model back."""
    assert all(gone(pid, 60) for pid in pids)
    assert not any(rank.alive for rank in model.health())
    with pytest.raises(ModelClosedError, match=rf"{reason}.*restart\(\)"):
        model(X)
    with pytest.raises(ModelClosedError):
        model.update_weights(toy.logical_weights())
    if restart:
        model.restart()
        assert model(X)["count"].item() == 1


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_during_a_call(model, victim):
    pids = pids_of(model)
    os.kill(pids[1 - victim], signal.SIGSTOP)  # so that the call is under way when the victim dies
    thread, result = call_in_thread(model, X)
    until_busy(model, victim)
    os.kill(pids[victim], signal.SIGKILL)
    thread.join(2 * LIMIT)
    (error,) = result
    assert isinstance(error, RankDiedError)
    assert error.rank == victim
    assert f"rank {victim} of 2 was ended by SIGKILL" in str(error)
    assert_closed(model, pids, f"rank {victim} of 2 was ended by SIGKILL", restart=victim == 0)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_stopped_during_a_call(path, victim):
    model = start(path)
    pids = pids_of(model)
    os.kill(pids[victim], signal.SIGSTOP)
    until_stopped(model, victim)
    begin = time.monotonic()
    with pytest.raises(RankTimeoutError) as caught:
        model.run_bucket("b2_s4", {"x": np.zeros((2, 4, toy.HIDDEN), "f4")}, timeout=TIMEOUT)
    assert time.monotonic() - begin >= TIMEOUT - 0.1
    assert caught.value.rank == victim
    assert f"rank {victim} (pid {pids[victim]}) is stopped" in str(caught.value)
    assert_closed(model, pids, f"rank {victim} of 2 did not finish its step within 3 s", restart=victim == 1)
    model.close()


def test_a_rank_killed_under_load(model):
    """Calls of several threads: each ends in its own right result, or in a typed error."""
    pids = pids_of(model)
    results: list[object] = []

    def caller(number: int) -> None:
        weights = toy.logical_weights()
        while True:
            x = torch.full((1, 1, toy.HIDDEN), float(number))
            try:
                y = model(x)["y"]
            except (RankDiedError, ModelClosedError) as error:
                results.append(error)
                return
            assert torch.allclose(y, toy.expected(weights, x), rtol=1e-5, atol=1e-5)

    threads = [threading.Thread(target=caller, args=(n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    os.kill(pids[1], signal.SIGKILL)
    for thread in threads:
        thread.join(2 * LIMIT)
    assert len(results) == 4
    assert all("rank 1 of 2 was ended by SIGKILL" in str(error) for error in results)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_a_rank_that_dies_while_nobody_calls_is_noticed(model):
    pids = pids_of(model)
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))  # nor do the others linger
    assert_closed(model, pids, "rank 0 of 2 was ended by SIGKILL")


def test_a_rank_that_raises(model):
    pids = pids_of(model)
    with pytest.raises(RankFailedError, match="rank 0 of 2 raised during step: IndexError") as caught:
        model(X, torch.tensor([toy.VOCABULARY]))
    assert caught.value.rank == 0
    assert "Traceback (most recent call last)" in caught.value.remote_traceback
    assert_closed(model, pids, "rank 0 of 2 raised during step: IndexError", restart=True)


@pytest.mark.parametrize("victim", [0, 1])
def test_one_rank_that_raises_while_the_other_waits(tmp_path, victim):
    """The victim raises before a collective in which the other waits: that wait does not hide the cause."""
    model = start(toy.build(tmp_path / "artifact", shifts={victim: toy.VOCABULARY}))
    pids = pids_of(model)
    with pytest.raises(RankFailedError, match=f"rank {victim} of 2 raised during step: IndexError") as caught:
        model(X)
    assert caught.value.rank == victim
    assert all(gone(pid, 60) for pid in pids)


def test_a_rank_that_cannot_load_says_why(path, tmp_path):
    """The artifact is damaged after it was verified: the start fails with the rank and its traceback."""
    import shutil

    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    model = parallel_model_load(copy, call_timeout=TIMEOUT, start_timeout=600)
    for graph in (copy / "graphs").glob("*/program.json"):
        graph.write_text("x" * graph.stat().st_size)
    with pytest.raises(RankFailedError, match=r"(?s)rank [01] of 2 raised during start.*ArtifactCorruptError"):
        model.start()
    assert model.health() == []
    with pytest.raises(RankFailedError):
        model(X)  # the next call tries again


def test_a_replaced_artifact_is_noticed(path, tmp_path):
    target = toy.build(tmp_path / "artifact")
    model = parallel_model_load(target, call_timeout=TIMEOUT, start_timeout=600)
    toy.build(target, weights=toy.logical_weights(3))
    with pytest.raises(RankFailedError, match="was replaced while it was loaded"):
        model.start()


def test_a_start_that_takes_too_long(path):
    model = parallel_model_load(path, call_timeout=TIMEOUT, start_timeout=0.001)
    with pytest.raises(RankTimeoutError, match=r"did not finish its start within 0\.001 s"):
        model.start()


def test_a_segmentation_fault_shows_its_stack(model):
    pids = pids_of(model)
    os.kill(pids[1], signal.SIGSTOP)
    thread, result = call_in_thread(model, X)
    until_busy(model, 0)
    os.kill(pids[0], signal.SIGSEGV)
    thread.join(2 * LIMIT)
    assert isinstance(result[0], RankDiedError)
    assert "rank 0 of 2 was ended by SIGSEGV" in str(result[0])
    assert "Fatal Python error: Segmentation fault" in str(result[0])
    assert "nxd_infer/runtime/rank_process/main.py" in str(result[0])


def test_the_step_that_ranks_were_at_gets_the_error_that_ended_them(model):
    """However late its outputs are asked for; whatever was begun after it is told that the model is closed."""
    pids = pids_of(model)
    os.kill(pids[1], signal.SIGSTOP)
    begun = [model.begin_bucket("b2_s4", {"x": np.zeros((2, 4, toy.HIDDEN), "f4")}) for _ in range(2)]
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: not any(rank.alive for rank in model.health()))
    with pytest.raises(RankDiedError, match="rank 0 of 2 was ended by SIGKILL"):
        begun[0].result()
    for call in (begun[1].result, lambda: model(X)):
        with pytest.raises(ModelClosedError, match=r"ended by SIGKILL.*restart\(\)"):
            call()


def test_ctrl_c_during_a_call_leaves_the_model_usable(path):
    code = """
        import os, signal, sys, torch
        from nxd_infer.runtime.save_load import parallel_model_load
        from tests.support.runtime.rank_processes import interrupt_the_wait
        model = parallel_model_load(sys.argv[1], call_timeout=60, start_timeout=600).start()
        x = torch.zeros(1, 1, 8)
        pid = model.health()[1].pid
        os.kill(pid, signal.SIGSTOP)
        interrupt_the_wait()
        try:
            model(x)
        except KeyboardInterrupt:
            print("interrupted")
        os.kill(pid, signal.SIGCONT)
        print(model(x)["count"].item(), model.health()[1].pid == pid)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.split("\n")[:2] == ["interrupted", "2.0 True"], done.stderr


def test_ctrl_c_between_the_records_of_two_ranks_ends_them(model, monkeypatch):
    """One has its step and the other does not: nothing else can be done."""
    send, sent = Channel.send, []

    def interrupted(channel, record, fds=()):
        if sent:
            raise KeyboardInterrupt
        sent.append(channel)
        send(channel, record, fds)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Channel, "send", interrupted)
        model(X)
    with pytest.raises(ModelClosedError, match=r"a call was interrupted: KeyboardInterrupt.*restart\(\)"):
        model(X)
    assert not any(rank.alive for rank in model.health())


def test_weights_that_one_rank_refuses_wait_for_the_others_and_end_nothing(model, tmp_path):
    slow = pids_of(model)[1]
    new = model.cut_weights(toy.logical_weights(1))
    new.files[0].close()
    new.files[0] = open(__file__, "rb")  # no safetensors file; closed with the others  # noqa: SIM115
    os.kill(slow, signal.SIGSTOP)
    timer = threading.Timer(1.5, os.kill, [slow, signal.SIGCONT])
    timer.start()
    with pytest.raises(WeightSchemaError, match="rank 0"):
        model.update_weights(new)
    timer.join()
    assert all(file.closed for file in new.files)
    assert all(rank.alive for rank in model.health())
    x = torch.randn(2, 4, toy.HIDDEN)
    torch.testing.assert_close(model(x)["y"], toy.expected(toy.logical_weights(), x))


def test_weights_whose_swap_was_interrupted_are_those_of_a_restart_too(model, monkeypatch):
    """Ranks that were told to use new weights do: the next call and restarted ranks agree."""
    slow = pids_of(model)[1]
    commit = swap.WeightSwaps._commit

    def interrupted(self, ranks):
        os.kill(slow, signal.SIGSTOP)
        interrupt_the_wait()
        commit(self, ranks)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(swap.WeightSwaps, "_commit", interrupted)
            model.update_weights(toy.logical_weights(1))
    finally:
        os.kill(slow, signal.SIGCONT)
        signal.signal(signal.SIGINT, before)
    x = torch.randn(2, 4, toy.HIDDEN)
    torch.testing.assert_close(model(x)["y"], toy.expected(toy.logical_weights(1), x))
    torch.testing.assert_close(model.restart()(x)["y"], toy.expected(toy.logical_weights(1), x))
    model.update_weights(toy.logical_weights())


def test_weights_that_were_cut_once_are_swapped_in_once(model, path):
    x = torch.randn(2, 4, toy.HIDDEN)
    new, other = model.cut_weights(toy.logical_weights(1)), model.cut_weights(toy.logical_weights(2))
    size = sum(os.fstat(file.fileno()).st_size for file in new.files)
    assert 0 < size <= sum(file.stat().st_size for file in (path / "weights").iterdir())  # as deployment.md has it
    model.update_weights(new)
    with pytest.raises(WeightSchemaError, match="cut_weights"):
        model.update_weights(new)
    torch.testing.assert_close(model.restart()(x)["y"], toy.expected(toy.logical_weights(1), x))
    model.update_weights(other)
    assert all(file.closed for file in new.files) and not any(file.closed for file in other.files)
    with pytest.raises(WeightSchemaError, match="cut_weights"):
        model.update_weights(new)
    torch.testing.assert_close(model.restart()(x)["y"], toy.expected(toy.logical_weights(2), x))
    model.update_weights(toy.logical_weights())


def test_a_replaced_artifact_is_noticed_in_process(tmp_path):
    model = parallel_model_load(toy.build(tmp_path / "artifact", degree=1))
    toy.build(tmp_path / "artifact", degree=1, weights=toy.logical_weights(1))
    with pytest.raises(ArtifactCorruptError, match="was replaced"):
        model(X)


def test_a_rank_that_stops_amid_a_swap_is_noticed_in_some_times_what_loading_took(path, monkeypatch):
    """While it hangs, no request is answered: that must not last as long as a first start may."""
    monkeypatch.setattr("nxd_infer.runtime.time_bounds.LEAST_SECONDS", 0.5)
    model = parallel_model_load(path, call_timeout=LIMIT).start()
    pids = pids_of(model)
    new = model.cut_weights(toy.logical_weights(seed=1))
    model.bounds.loaded(1.0)  # whatever the start has taken here
    assert model.bounds.start > 300 > 30 > model.bounds.load
    os.kill(pids[1], signal.SIGSTOP)
    until_stopped(model, 1)
    with pytest.raises(
        RankTimeoutError, match=r"rank 1 of 2 did not finish its prepare weights .* raise start_timeout"
    ):
        model.update_weights(new)
    assert all(gone(pid, 120) for pid in pids)
    model.bounds.loaded(100.0)  # which bounds the restart
    model.restart()
    x = torch.randn(2, 8, toy.HIDDEN)
    assert torch.allclose(model(x)["y"], toy.expected(toy.logical_weights(), x), rtol=1e-5, atol=1e-5)
    model.close()


def test_ranks_wait_for_each_other_longer_than_a_call_for_them(path):
    """Whatever the settings: the caller is the one to find out who hangs."""
    for settings in ({}, {"start_timeout": 20.0}, {"call_timeout": 500.0}):
        model = parallel_model_load(path, **settings)
        assert model._new_ranks()._processes._collective_timeout > model.bounds.longest_call


def test_ranks_without_a_native_library_use_gloo(path, monkeypatch):
    from nxd_infer.runtime.supervisor import rank_processes

    monkeypatch.setattr(rank_processes, "_libraries", lambda artifact: [])
    model = start(path)
    pids = pids_of(model)
    x = torch.randn(2, 8, toy.HIDDEN)
    assert torch.allclose(model(x)["y"], toy.expected(toy.logical_weights(), x), rtol=1e-5, atol=1e-5)
    os.kill(pids[1], signal.SIGSTOP)
    until_stopped(model, 1)
    with pytest.raises(RankTimeoutError, match="rank 1 of 2 did not finish"):
        model.run_bucket("b2_s8", {"x": x}, timeout=TIMEOUT)
    assert all(gone(pid, 60) for pid in pids)
