"""Engines under test run a toy model, both ways in which a model can take its steps."""

from __future__ import annotations

import pytest

from nxd_server.engine import Engine, OneShotEngine
from tests.support.engine.toy_model import ToyModel
from tests.support.engine.toy_oneshot import ToyOneShot


@pytest.fixture(autouse=True)
def takes_steps(request, monkeypatch):
    """A toy model takes a step while the one before it runs; with ``BOTH_WAYS`` also when that is over."""
    monkeypatch.setattr(ToyModel, "ahead", getattr(request, "param", True))


@pytest.fixture
def engines():
    """Makes engines and closes them; each must end empty, with every slot free."""
    made = []

    def make(model=None, **options):
        model = model or ToyModel()
        engine = Engine(model, **{"costs": model.costs, "restart_limit": 1, "idle_probe": None, **options})
        made.append(engine)
        engine.start()
        return engine

    yield make
    for engine in made:
        engine.close()
        assert engine.stats().slots_free == engine.slots
        assert engine.parts.queue.inside == engine.parts.queue.unreported == engine.stats().waiting_tokens == 0
        assert not engine.parts.gate._begun and not engine.parts.gate.wanted


@pytest.fixture
def oneshot_engines():
    """The same of engines for models of one step."""
    made = []

    def make(model=None, **options):
        model = model or ToyOneShot()
        engine = OneShotEngine(model, **{"costs": model.costs, "restart_limit": 1, "idle_probe": None, **options})
        made.append(engine)
        engine.start()
        model.calls.clear()  # of the warm-up
        return engine

    yield make
    for engine in made:
        engine.close()
        assert engine.parts.queue.inside == engine.parts.queue.unreported == 0 and not engine.parts.gate._begun
