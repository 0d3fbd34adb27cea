"""Engines under test run a toy model, both ways in which a model can take its steps."""

from __future__ import annotations

import pytest

from tests.engine.toy_model import ToyModel


@pytest.fixture(params=[False, True], ids=["each", "ahead"])
def toy_takes_steps(request, monkeypatch):
    """Toy models take a step when the one before it is over, or while it runs."""
    monkeypatch.setattr(ToyModel, "ahead", request.param)
