"""Weights in eight bits as a user meets them: traced, verified, generated from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.e2e.command import nxd_infer_here
from tests.support.tiny_models import write_tiny


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    # One layer has every kind of weight, and is compiled in half the time.
    return write_tiny("llama", tmp_path_factory.mktemp("quantize") / "model", num_hidden_layers=1)


def test_a_llama_in_eight_bits_is_traced_verified_and_generates(model_dir, tmp_path, capsys, monkeypatch):
    out = tmp_path / "artifact"
    # The model's weights are small: all of them are to be packed.
    done = nxd_infer_here(
        *(capsys, monkeypatch, "trace", model_dir, "--tp", 2, "--out", out, "--quantize", "int8", "--batch-sizes", "1"),
        *("--prompt-buckets", "16", "--max-len", 64, "--dtype", "float32", "--compiler-args", "nxd_packed=1"),
        *("--lora-slots", 1),
    )
    assert done.status == 0, done.err
    assert "linear layers keep their weights in int8" in done.out
    count = re.search(
        r"int8: each rank holds (\d+) of its (\d+) weights so, ([0-9.]+) KiB instead of ([0-9.]+)", done.out
    )
    assert count and 0 < int(count[1]) < int(count[2]) and float(count[3]) < float(count[4]), done.out
    # To 1e-4, with the weights that the ranks round to.
    done = nxd_infer_here(capsys, monkeypatch, "verify", out, model_dir)
    assert done.status == 0, done.out + done.err
    assert "weights rounded to int8" in done.out
    assert re.search(r"logits +differ by [0-9.e-]+ at most", done.out), done.out
    assert re.search(r"next tokens +\d+ of 64 are the same", done.out), done.out
    done = nxd_infer_here(capsys, monkeypatch, "generate", out, "def f", "--max-tokens", 8)
    assert done.status == 0, done.err


def test_an_encoder_in_eight_bits_is_verified(tmp_path, capsys, monkeypatch):
    model_dir = write_tiny("bert", tmp_path / "model", num_hidden_layers=1)
    done = nxd_infer_here(
        *(capsys, monkeypatch, "trace", model_dir, "--out", tmp_path / "artifact", "--quantize", "int8"),
        *("--batch-sizes", "2", "--prompt-buckets", "16", "--dtype", "float32", "--compiler-args", "nxd_packed=1"),
    )
    assert done.status == 0, done.err
    done = nxd_infer_here(capsys, monkeypatch, "verify", tmp_path / "artifact", model_dir)
    assert done.status == 0, done.out + done.err
    assert re.search(r"outputs differ by [0-9.e-]+ at most", done.out), done.out


def test_another_number_of_bits_is_refused_with_the_choices(model_dir, tmp_path, capsys, monkeypatch):
    done = nxd_infer_here(capsys, monkeypatch, "trace", model_dir, "--out", tmp_path / "a", "--quantize", "int4")
    assert done.status == 1 and "int4" in done.err and "'int8'" in done.err, done.err
