"""The protocol between the benchmarks and those they measure, and what they measure of a tiny model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.peers.driver import Peer, PeerError, Run
from bench.peers.known import KNOWN, Known
from bench.process_groups import memory_of
from nxd_infer.processes.state import process_state
from tests.support.processes import wait_until

ECHO = """
import time
from bench.peers.protocol import serve

class Echo:
    version = "1"
    def __init__(self, model): print("loading", model)
    def run(self, prompts, new_tokens):
        return {"tokens": [[1] * new_tokens for _ in prompts], "times": [[0.5] * new_tokens for _ in prompts]}
    def short(self): return {"tokens": [[1]], "times": [[0.1]]}
    def fail(self): raise KeyError("no such thing")
    def sleep(self, seconds): time.sleep(seconds)

serve(Echo)
"""


def echo(tmp_path: Path) -> Peer:
    return Peer("echo", [sys.executable, "-c", ECHO], tmp_path / "echo.log")


def asleep(peer: Peer) -> None:
    """Between two questions a peer is stopped; the signal takes a moment."""
    wait_until(lambda: process_state(peer.group.pid) == "stopped")


def test_a_peer_is_asked_answers_and_fails_without_ending(tmp_path):
    with echo(tmp_path) as peer:
        peer.start(120.0, model="there")
        assert peer.version == "1"
        asleep(peer)
        assert peer.run([[1, 2], [3, 4]], 3) == Run([[1] * 3] * 2, [[0.5] * 3] * 2)
        with pytest.raises(PeerError, match="no such thing"):
            peer.ask("fail", 60.0)
        assert peer.ask("short", 60.0)["tokens"] == [[1]]
        assert memory_of(peer.group.pid) > 1 << 20
    assert not peer.group.alive()
    assert "loading there" in peer.group.tail()  # what it prints is no answer


def test_a_peer_that_is_too_slow_is_ended(tmp_path):
    with echo(tmp_path) as peer:
        peer.start(120.0, model="there")
        with pytest.raises(PeerError, match=r"did not answer within [01] s"):
            peer.ask("sleep", 0.6, seconds=600)
        assert not peer.group.alive()
        with pytest.raises(PeerError, match="ended"):
            peer.ask("short", 60.0)


def test_a_peer_that_is_not_installed_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setenv("NXD_INFER_BENCH", str(tmp_path))
    with pytest.raises(PeerError, match="python -m bench peers install llama_cpp"):
        KNOWN["llama_cpp"].python()
    assert Known("hugging_face").python() == Path(sys.executable)
