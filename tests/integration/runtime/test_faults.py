"""Ranks that die, stop, raise or never start, and callers that do: typed errors in time, and no orphans."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
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
from nxd_infer.runtime.ipc import Channel
from nxd_infer.runtime.model import TensorParallelModel, parallel_model_load
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
    raising,
    until_busy,
    until_stopped,
)


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


@pytest.mark.smoke
def test_a_rank_killed_during_a_call(model):
    pids = pids_of(model)
    os.kill(pids[1], signal.SIGSTOP)  # so that the call is under way when the other dies
    calls = [call_in_thread(model, X) for _ in range(3)]  # two of them wait for their turn
    until_busy(model, 0)
    os.kill(pids[0], signal.SIGKILL)
    for thread, _ in calls:
        thread.join(2 * LIMIT)
    errors = [error for _, result in calls for error in result]
    assert len(errors) == 3 and all("rank 0 of 2 was ended by SIGKILL" in str(error) for error in errors)
    (died,) = (error for error in errors if isinstance(error, RankDiedError))
    assert died.rank == 0 and all(isinstance(error, (RankDiedError, ModelClosedError)) for error in errors)
    assert_closed(model, pids, "rank 0 of 2 was ended by SIGKILL", restart=True)


def test_a_rank_stopped_during_a_call(model):
    """A step that was begun behind it ends with it."""
    pids = pids_of(model)
    os.kill(pids[1], signal.SIGSTOP)
    until_stopped(model, 1)
    begin = time.monotonic()
    x = np.zeros((2, 4, toy.HIDDEN), "f4")
    begun = [model.begin_bucket("b2_s4", {"x": x}, timeout=TIMEOUT) for _ in range(2)]
    with pytest.raises(RankTimeoutError, match=rf"rank 1 \(pid {pids[1]}\) is stopped") as caught:
        begun[0].result()
    assert caught.value.rank == 1 and time.monotonic() - begin >= TIMEOUT - 0.1
    with pytest.raises(ModelClosedError):
        begun[1].result()
    assert_closed(model, pids, "rank 1 of 2 did not finish its step within 1 s")


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


def test_a_rank_that_cannot_load_or_takes_too_long_says_so(path, tmp_path):
    """The artifact is damaged after it was verified: the start fails with the rank and its traceback."""
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    model = parallel_model_load(copy, call_timeout=TIMEOUT, start_timeout=600)
    for graph in (copy / "graphs").glob("*/program.json"):
        graph.write_text("x" * graph.stat().st_size)
    with pytest.raises(RankFailedError, match=r"(?s)rank [01] of 2 raised during start.*ArtifactCorruptError"):
        model.start()
    assert model.health() == []
    with pytest.raises(RankFailedError):
        model(X)  # the next call tries again
    model = parallel_model_load(path, start_timeout=0.001)
    with pytest.raises(RankTimeoutError, match=r"did not finish its start within 0\.001 s"):
        model.start()


@pytest.mark.parametrize(("degree", "error"), [(1, ArtifactCorruptError), (2, RankFailedError)])
def test_a_replaced_artifact_is_noticed(tmp_path, degree, error):
    target = toy.build(tmp_path / "artifact", degree=degree)
    model = parallel_model_load(target, start_timeout=600)
    toy.build(target, degree=degree, weights=toy.logical_weights(3))
    with pytest.raises(error, match="was replaced"):
        model(X)


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


def test_ctrl_c_during_a_call_leaves_the_model_usable(model):
    pids = pids_of(model)
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(KeyboardInterrupt), raising(signal.SIGINT):
        interrupt_the_wait()
        model(X)
    os.kill(pids[1], signal.SIGCONT)
    assert model(X)["count"].item() == 2
    assert pids_of(model) == pids


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
    timer = threading.Timer(0.5, os.kill, [slow, signal.SIGCONT])
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

    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), raising(signal.SIGINT):
            patch.setattr(swap.WeightSwaps, "_commit", interrupted)
            model.update_weights(toy.logical_weights(1))
    finally:
        os.kill(slow, signal.SIGCONT)
    x = torch.randn(2, 4, toy.HIDDEN)
    torch.testing.assert_close(model(x)["y"], toy.expected(toy.logical_weights(1), x))
    torch.testing.assert_close(model.restart()(x)["y"], toy.expected(toy.logical_weights(1), x))
    model.update_weights(toy.logical_weights())


def test_weights_that_were_cut_once_are_swapped_in_once(model, path):
    x = torch.randn(2, 4, toy.HIDDEN)
    new, other = model.cut_weights(toy.logical_weights(1)), model.cut_weights(toy.logical_weights(2))
    size = sum(os.fstat(file.fileno()).st_size for file in new.files)
    assert 0 < size <= sum(file.stat().st_size for file in (path / "weights").iterdir())  # as docs/serving.md has it
    model.update_weights(new)
    with pytest.raises(WeightSchemaError, match="cut_weights"):
        model.update_weights(new)
    torch.testing.assert_close(model.restart()(x)["y"], toy.expected(toy.logical_weights(1), x))
    model.update_weights(other)
    assert all(file.closed for file in new.files) and not any(file.closed for file in other.files)
    torch.testing.assert_close(model.restart()(x)["y"], toy.expected(toy.logical_weights(2), x))
    model.update_weights(toy.logical_weights())


def test_a_rank_that_stops_amid_a_swap_is_noticed_in_some_times_what_loading_took(path, monkeypatch):
    """While it hangs, no request is answered: that must not last as long as a first start may."""
    monkeypatch.setattr("nxd_infer.runtime.time_bounds.LEAST_SECONDS", 0.5)
    model = parallel_model_load(path, call_timeout=LIMIT).start()
    pids = pids_of(model)
    new = model.cut_weights(toy.logical_weights(seed=1))
    model.bounds.loaded(0.3)  # whatever the start has taken here
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
