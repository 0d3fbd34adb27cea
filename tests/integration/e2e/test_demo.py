"""The demo, and the ranks that it starts: none is left behind, whatever ends the job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.process_groups import tree
from nxd_infer.cli.demo import smollm2
from nxd_infer.processes.state import process_state
from tests.support.e2e.command import here
from tests.support.processes import wait_until

LEARNT = dict(
    zip(smollm2.ASKED, ("Python package that splits", "attention heads of zeros", "RankDiedError"), strict=True)
)


def test_ctrl_c_ends_the_demo_with_all_it_started(tmp_path: Path):
    command = [sys.executable, "-m", "nxd_infer.cli.main", "demo", "--dir", str(tmp_path / "demo"), "--seconds", "600"]
    log = tmp_path / "output"
    with log.open("wb") as output:
        demo = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        wait_until(lambda: "step" in log.read_text(errors="replace") or demo.poll() is not None, 600)  # it trains
        assert demo.poll() is None, log.read_text(errors="replace")
        started = tree(demo.pid)
        assert len(started) >= 3, "two ranks"
        demo.send_signal(signal.SIGINT)
        assert demo.wait(60) == 130
        assert [process_state(pid) for pid in started] == ["ended"] * len(started)
        assert "Traceback" not in log.read_text()
    finally:
        demo.kill()
        demo.wait()


def test_the_demo_teaches_a_real_model_what_it_could_not_know(tmp_path: Path):
    """The GGUF file, adapters at degree 2 for 9 heads, the merged model traced, served, and compared with plain
    PyTorch."""
    shown = here("demo", "--dir", tmp_path / "demo")
    assert shown.status == 0, shown.out + shown.err
    words = " ".join(shown.out.split())
    for question, fact in LEARNT.items():
        before, _, after = words.partition(f"{question} (before:")[2].partition(")")
        assert fact in after.partition("(before:")[0] and fact not in before
    assert "(before: The capital of France is Paris.) The capital of France is Paris." in words
    compared = here("verify", tmp_path / "demo/artifact", tmp_path / "demo/model", "--tolerance", 0.1)
    assert compared.status == 0, compared.out


@pytest.mark.smoke
def test_without_the_package_a_small_model_is_trained(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "llm-of-nobody")
    shown = here("demo", "--dir", tmp_path / "demo", "--seconds", 2, "--tp", 1)
    assert shown.status == 0, shown.out + shown.err
    assert "without the package llm-of-nobody" in shown.out and "train a small Llama" in shown.out
    assert "note: 2 s leave a loss of " in shown.out and "--seconds 10 trains a better model" in shown.out
