"""Questions to an engine in a test, and waiting for what it does. The bounds of time guard against hanging alone."""

from __future__ import annotations

import contextlib
import threading

import pytest

from nxd_server.engine import SamplingParams
from tests.support.engine.toy_model import VOCAB, Listener

BOTH_WAYS = pytest.mark.parametrize("takes_steps", [False, True], ids=["each", "ahead"], indirect=True)
SYSTEM = [(11 * place + 3) % VOCAB for place in range(20)]
"""What prompts have in common at their start."""
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def ask(engine, prompt, params=GREEDY, timeout=60.0, **options):
    listener = Listener(params.n)
    assert engine.submit(prompt, params, listener, **options).wait(timeout)
    return listener


def ask_all(engine, prompts):
    """The answers to ``prompts``, all of which are there before the first step."""
    listeners = [Listener() for _ in prompts]
    with held(engine.model):
        tickets = [engine.submit(prompt, GREEDY, one) for prompt, one in zip(prompts, listeners, strict=True)]
    assert all(ticket.wait(60) for ticket in tickets)
    return listeners


@contextlib.contextmanager
def held(model):
    """Hold the next step of ``model``, and all after it, until the end of this block."""
    go, fail = threading.Event(), model.fail

    def wait(name, inputs):
        assert go.wait(60)
        fail(name, inputs)

    model.fail = wait
    try:
        yield
    finally:
        model.fail = fail
        go.set()
