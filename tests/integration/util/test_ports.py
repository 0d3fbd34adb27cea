"""Free ports."""

from __future__ import annotations

import socket

import pytest

from nxd_infer.util import ports


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports.free_port()))
        number = taken.getsockname()[1]
        monkeypatch.setattr(ports.random.SystemRandom, "sample", lambda *_: [number, number + 1, number + 2])
        assert ports.free_port() in (number + 1, number + 2)
