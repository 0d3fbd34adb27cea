"""Real ranks that are lost, or hang, while they are being started again."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from nxd_infer.errors import RankDiedError
from nxd_infer.layout import as_source
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.rank_model import RankModel
from nxd_infer.runtime.supervisor.rank_processes import RankProcesses
from nxd_server import SamplingParams
from nxd_server.engine import Engine
from nxd_server.errors import EngineFailedError
from tests.support.engine.real_artifacts import costs_of, trace_llama
from tests.support.engine.toy_model import Listener
from tests.support.processes import wait_until
from tests.support.tiny_models import FAMILIES, tiny_state_dict

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
HEALTHY = 100.0
"""What loading is taken to have needed: bounds follow."""


@pytest.fixture(scope="module")
def artifact():
    return load_artifact(trace_llama(2)[1])


class Plagued(RankModel):
    """Rank 1 is killed while the ranks load, at as many starts as ``plagues`` says."""

    plagues = 0

    def strike(self, number):
        pid = self.health()[1].pid
        assert pid is not None
        os.kill(pid, number)

    def restart(self):
        self.bounds.loaded(HEALTHY)
        with pytest.MonkeyPatch.context() as patch:
            if self.plagues:
                self.plagues -= 1
                started = RankProcesses.wait_started

                def wait_started(processes, seconds):
                    started(processes, 600)
                    os.kill(processes.pid(1), STOP)  # so that it is still loading when the signal comes
                    threading.Timer(0.3, os.kill, [processes.pid(1), KILL]).start()

                patch.setattr(RankProcesses, "wait_started", wait_started)
            return super().restart()


@pytest.fixture
def model(artifact, monkeypatch):
    monkeypatch.setattr("nxd_infer.runtime.time_bounds.LEAST_SECONDS", 0.5)
    with Plagued(artifact, call_timeout=60.0, start_timeout=None) as model:
        yield model


def ask(engine):
    listener = Listener()
    assert engine.submit([5, 6, 7], GREEDY, listener).wait(120)
    return listener


@pytest.mark.parametrize("allowed", [2, 1])
def test_who_waits_for_a_swap_goes_on_waiting_until_the_ranks_are_ready_or_given_up(model, allowed):
    """Its request has not begun: it has lost nothing with the ranks that are lost in the swap, nor with the next."""
    new = as_source(tiny_state_dict({**FAMILIES["llama"], "num_hidden_layers": 1}, seed=3))
    costs = costs_of(model.artifact.path)
    with Engine(model, idle_probe=None, costs=costs, restart_limit=allowed) as engine:
        answer = ask(engine).tokens
        model.bounds.loaded(HEALTHY)
        model.strike(STOP)
        swap, listener = ThreadPoolExecutor(1).submit(engine.update_weights, new, timeout=60), Listener()
        wait_until(lambda: engine.parts.gate.changing)
        ticket = engine.submit([5, 6, 7], GREEDY, listener)
        model.plagues = 1
        model.strike(KILL)
        assert ticket.wait(120)
        with pytest.raises(RankDiedError, match="was ended by SIGKILL"):
            swap.result(60)
        if allowed == 2:
            assert listener.tokens == [*answer] and ticket.whole.version == 0
        else:
            assert isinstance(listener.end.error, EngineFailedError) and engine.wait_failed(120)
            assert "could not be started again: rank 1 of 2 was ended by SIGKILL" in engine.verdict
            assert "as often as max_restarts allows (1 in 600 s)" in engine.verdict
            assert engine.restarts.count == 1 and engine.health().recovering_for is None
