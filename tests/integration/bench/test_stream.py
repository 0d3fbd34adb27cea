"""The reading of the bandwidth, and the share that is taken of it."""

from __future__ import annotations

from pathlib import Path

from bench import decode
from bench.model import COMMON
from bench.stats import Turn
from bench.stream import MEBIBYTES, read_bandwidth


def test_memory_is_read():
    assert 0 < read_bandwidth() < 1e13


def test_the_share_counts_turns_that_kept_their_place(monkeypatch):
    monkeypatch.setattr(decode, "bytes_per_step", lambda model: 400e6)
    kept, moved = Turn(200.0, 90e9, 110e9, True), Turn(400.0, 40e9, 40e9, False)
    (verdict,) = decode._share(Path("model"), "ours", [kept, moved])
    assert (verdict.measured.median, verdict.measured.count) == (0.8, 1)
    assert "1 of 2 turns held" in verdict.note and "100.0" in verdict.note
    (verdict,) = decode._share(Path("model"), "ours", [moved])  # none held: all count, and the note says so
    assert verdict.measured.median == 4.0 and "0 of 1 turns held" in verdict.note


def test_no_less_is_read_than_a_step_of_the_common_model_reads():
    hidden, vocab = COMMON["hidden"], COMMON["vocab"]
    keys = hidden * COMMON["kv_heads"] // COMMON["heads"]
    layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * COMMON["intermediate"]
    assert MEBIBYTES << 20 > 2 * (vocab * hidden + COMMON["layers"] * layer) > 440e6
