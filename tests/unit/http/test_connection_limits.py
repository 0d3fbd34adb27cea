"""Which connection makes room for a new one, and how many there may be."""

from __future__ import annotations

import resource
from unittest.mock import Mock

import pytest

from nxd_server.http.connections import Connections, most_connections
from nxd_server.settings import ServerSettings


def test_to_find_it_only_those_are_asked_that_owe_for_longer():
    """If every new connection evicts one, scanning all connections delayed /livez each time."""
    asked: list[Owing] = []

    class Owing:
        address, since, owing = "x", 0.0, True
        loop = transport = Mock()

        @property
        def owes(self):
            asked.append(self)
            return self.owing

        def crowd(self):
            pytest.fail("there was room")

    connections = Connections(ServerSettings(max_connections=100))
    all = [Owing() for _ in range(100)]
    for one in all:
        assert connections.admit(one)  # pyright: ignore[reportArgumentType]
    connections.due(all[0])  # pyright: ignore[reportArgumentType]
    all[1].owing = False
    assert not asked
    assert connections.admit(Owing())  # pyright: ignore[reportArgumentType]
    assert asked == all[1:3] and len(connections) == 100
    assert all[0] in connections._all and all[1] in connections._all and all[2] not in connections._all


def test_a_million_descriptors_are_no_million_connections(monkeypatch):
    """All of them are looked at four times a second."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**20, 2**20))
    assert most_connections(None) == 4096
    assert most_connections(20_000) == 20_000
