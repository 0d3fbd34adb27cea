"""Attackers end in time and say what they sent; what those see who watch is judged by its bounds."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from bench.attackers import ATTACKS, Tally, Target
from bench.siege import Held, Reading, Siege
from tests.support.http.http_servers import toy_server


@pytest.fixture(scope="module")
def server():
    with toy_server(access_log=False, render_timeout=60) as server:
        yield server


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attacker_says_what_it_sent_and_the_server_serves_on(server, name):
    silent = name in ("nothing", "busy", "idle", "slow heads")
    tally = Tally()
    for seconds in (0.2, 5):  # a fifth of a second may be over before the first attack
        ATTACKS[name](Target(server.port, time.monotonic() + seconds, 2**19, "", ("model",), tally))
        if silent or tally.sent:
            break
    assert bool(tally.sent) != silent
    assert not {"500", "cut"} & set(tally.answers)
    server.wait_metric("nxd_texts_aside", 0.0)
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_those_who_watch_an_attack_see_looks_gaps_and_what_is_held(server):
    siege = Siege(server.port, server.process.pid, tokens=50, body_bytes=2**20)
    for seconds, calm in ((2, 4), (30, 60)):  # the first are few for a machine that stands still for some
        reading = siege.attack("text", seconds=seconds, calm=calm)
        if reading.livez and reading.gaps and reading.step > 0:
            break
    assert reading.livez and reading.gaps and reading.step > 0
    assert reading.before.memory > 2**20 and reading.before.descriptors > 5 and reading.before.threads > 1
    assert reading.tally["sent"]["/v1/completions"] == sum(reading.tally["answers"].values()) > 0
    assert len(reading.row()) == 9


def test_what_does_not_hold_is_told_with_its_bound():
    held = Held(memory=100 * 2**20, descriptors=40, threads=10)
    good = Reading("x", [0.01, 0.09], [0.01, 0.04], 0.01, 0, {"sent": {}, "answers": {}}, held, held)
    assert good.wrong() == [] and good.steps == 4.0
    assert good.wrong(gap_steps=3.0) == ["x: a stream paused for 4.0 steps of 10.0 ms, at most 3"]
    assert replace(good, livez=[0.2]).wrong() == ["x: /livez took 200 ms, at most 100"]
    assert replace(good, livez=[]).wrong() == ["x: /livez was not answered"]
    assert replace(good, gaps=[]).wrong() == ["x: no stream was served"]
    assert replace(good, cut=2).wrong() == ["x: 2 streams were refused or cut"]
    assert held.grown(Held(101 * 2**20, 40, 10)) == []
    assert held.grown(Held(103 * 2**20, 41, 11)) == [
        "memory in MiB: 103, 100 before", "descriptors: 41, 40 before", "threads: 11, 10 before"
    ]  # fmt: skip
