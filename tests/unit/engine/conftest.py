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


@pytest.fixture(scope="session")
def tokenizer():
    from tests.support.http.http_toy import toy_tokenizer

    return toy_tokenizer()


def _made(kind, toy):
    """Makes engines and closes them; each must end empty, with every slot free."""
    made = []

    def make(model=None, **options):
        model = model or toy()
        engine = kind(model, **{"costs": model.costs, "restart_limit": 1, "idle_probe": None, **options})
        made.append(engine)
        engine.start()
        return engine

    yield make
    for engine in made:
        engine.close()
        assert engine.queue.inside == engine.queue.unreported == 0
        assert not engine.gate._begun and not engine.gate.closed
        stats = engine.stats()
        assert stats.slots_free == stats.slots and stats.waiting_tokens == 0


@pytest.fixture
def engines():
    yield from _made(Engine, ToyModel)


@pytest.fixture
def oneshot_engines():
    yield from _made(OneShotEngine, ToyOneShot)
