"""Questions to an engine in a test, and waiting for what it does."""

from __future__ import annotations

import time

from nxd_server.engine import SamplingParams
from tests.engine.toy_model import Listener

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def ask(engine, prompt, params=GREEDY, timeout=20.0, **options):
    listener = Listener(params.n)
    assert engine.submit(prompt, params, listener, **options).wait(timeout)
    return listener


def wait_until(condition, timeout=10.0):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.002)
