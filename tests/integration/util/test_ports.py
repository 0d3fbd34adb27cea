"""Free ports: free, and none that the system may give away before they are used."""

from __future__ import annotations

import contextlib
import socket

from nxd_infer.util import ports


def listening(port: int) -> socket.socket:
    taken = socket.socket()
    taken.bind(("127.0.0.1", port))
    taken.listen()
    return taken


def test_a_free_port_is_none_that_connections_are_given():
    with socket.socket() as given:
        given.bind(("127.0.0.1", 0))
        assert given.getsockname()[1] >= ports._first_given()
    found = {ports.free_port() for _ in range(20)}
    assert all(ports._LOWEST <= port < ports._first_given() for port in found) and len(found) > 10
    for port in found:
        listening(port).close()


def test_taken_ports_are_passed_over(monkeypatch):
    first = ports.free_port()
    monkeypatch.setattr(ports, "_LOWEST", first)
    monkeypatch.setattr(ports, "_TRIES", 3)
    monkeypatch.setattr(ports, "_first_given", lambda: first + 3)
    with contextlib.ExitStack() as held:
        for port in (first + 2, first):
            held.enter_context(listening(port))
            assert ports.free_port() != port
        assert ports.free_port() == first + 1
        held.enter_context(listening(first + 1))
        assert not first <= ports.free_port() < first + 3
