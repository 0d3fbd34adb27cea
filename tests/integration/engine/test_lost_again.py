"""Real ranks that are lost, or hang, while they are being started again."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from nxd_infer.errors import RankDiedError
from nxd_infer.layout import as_source
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.rank_model import RankModel
from nxd_infer.runtime.supervisor.rank_processes import RankProcesses
from nxd_server import SamplingParams
from nxd_server.engine import Engine
from nxd_server.errors import EngineFailedError, EngineUnavailableError
from tests.support.engine.real_artifacts import costs_of, trace_llama
from tests.support.engine.toy_model import Listener
from tests.support.processes import gone, wait_until
from tests.support.tiny_models import FAMILIES, tiny_state_dict

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
HEALTHY, SHORT = 100.0, 0.2
"""What loading is taken to have needed: bounds follow, for ranks that shall be ready and for those that never are."""


@pytest.fixture(scope="module")
def artifact():
    return load_artifact(trace_llama(2)[1])


class Plagued(RankModel):
    """Each start after the first one loses rank 1 as ``plagues`` says next: to a signal, while the ranks load or before
    their first step."""

    def __init__(self, artifact):
        super().__init__(artifact, call_timeout=60.0, start_timeout=None)
        self.plagues: list[tuple[str, int]] = []
        self.pids: list[int | None] = []
        """Of every rank there was."""

    def strike(self, number):
        pid = self.health()[1].pid
        assert pid is not None
        os.kill(pid, number)

    def restart(self):
        self.pids += [rank.pid for rank in self.health()]
        when, number = self.plagues.pop(0) if self.plagues else ("", 0)
        self.bounds.loaded(HEALTHY)
        with pytest.MonkeyPatch.context() as patch:
            if when == "loading":
                started = RankProcesses.wait_started

                def wait_started(processes, seconds):
                    started(processes, 600)
                    if number == STOP:
                        self.bounds.loaded(SHORT)
                    os.kill(processes.pid(1), STOP)  # so that it is still loading when the signal comes
                    threading.Timer(0.3, os.kill, [processes.pid(1), number]).start()

                patch.setattr(RankProcesses, "wait_started", wait_started)
            super().restart()
        if when == "ready":
            self.bounds.loaded(SHORT)
            self.strike(number)
        return self


@pytest.fixture
def model(artifact, monkeypatch):
    monkeypatch.setattr("nxd_infer.runtime.time_bounds.LEAST_SECONDS", 0.5)
    with Plagued(artifact) as model:
        yield model


def engine_of(model, **options):
    return Engine(model, idle_probe=None, costs=costs_of(model.artifact.path), **options)


def ask(engine):
    listener = Listener()
    assert engine.submit([5, 6, 7], GREEDY, listener).wait(120)
    return listener


def test_ranks_lost_while_they_start_again_are_started_once_more(model, caplog):
    """One is killed while it loads, one hangs in its first step."""
    caplog.set_level("INFO")
    states, stages = [], []
    with engine_of(model, restart_limit=3, on_state=states.append) as engine:
        answer = ask(engine).tokens
        restart = model.restart

        def watched():
            stages.append(engine.health().stage)
            with pytest.raises(EngineUnavailableError, match="recovering"):
                ask(engine)
            return restart()

        model.restart = watched
        model.plagues = [("loading", KILL), ("ready", STOP)]
        model.strike(KILL)
        wait_until(lambda: engine.restarts.count == 3 and engine.state == "ready")
        assert ask(engine).tokens == answer and engine.health().recovering_for is None
    assert states == ["ready", "recovering", "ready", "closed"]
    assert stages == ["the ranks load", "the ranks load (attempt 2)", "the ranks load (attempt 3)"]
    assert len(model.pids) == 4 and all(gone(pid) for pid in model.pids if pid)
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert not any(record.exc_info for record in errors) and not any("\n" in r.getMessage() for r in errors)
    begun = ("was ended by SIGKILL", "its step within")
    assert all(word in record.getMessage() for word, record in zip(begun, errors[1:], strict=True))


@pytest.mark.parametrize("allowed", [2, 1])
def test_who_waits_for_a_swap_goes_on_waiting_until_the_ranks_are_ready_or_given_up(model, allowed):
    """Its request has not begun: it has lost nothing with the ranks that are lost in the swap, nor with the next."""
    new = as_source(tiny_state_dict({**FAMILIES["llama"], "num_hidden_layers": 1}, seed=3))
    with engine_of(model, restart_limit=allowed) as engine:
        answer = ask(engine).tokens
        model.bounds.loaded(HEALTHY)
        model.strike(STOP)
        told: list[Exception] = []

        def swap():
            with pytest.raises(RankDiedError) as caught:
                engine.update_weights(new, timeout=60)
            told.append(caught.value)

        thread, listener = threading.Thread(target=swap), Listener()
        thread.start()
        wait_until(lambda: engine.parts.gate.changing)
        ticket = engine.submit([5, 6, 7], GREEDY, listener)
        model.plagues = [("loading", KILL)]
        model.strike(KILL)
        assert ticket.wait(120)
        thread.join()
        assert told and "was ended by SIGKILL" in str(told[0])
        if allowed == 2:
            assert listener.tokens == [*answer] and ticket.whole.version == 0
        else:
            assert isinstance(listener.end.error, EngineFailedError) and engine.wait_failed(120)
            assert "could not be started again: rank 1 of 2 was ended by SIGKILL" in engine.verdict
            assert "as often as max_restarts allows (1 in 600 s)" in engine.verdict
            assert engine.restarts.count == 1 and engine.health().recovering_for is None
