"""A server goes on answering others while each attack of the benchmark runs, and afterwards."""

from __future__ import annotations

import pytest

from bench.attacks import ATTACKS, beside
from tests.support.http.http_servers import toy_server


@pytest.fixture(scope="module")
def server():
    with toy_server(toy={"max_len": 500, "delay": 0.005}, access_log=False, header_timeout=2) as server:
        yield server


@pytest.mark.parametrize("name", ATTACKS)
def test_others_are_answered_beside_an_attack(server, name):
    reading = beside(ATTACKS[name], server.port, 2.0)
    assert reading.livez and not reading.errors
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
