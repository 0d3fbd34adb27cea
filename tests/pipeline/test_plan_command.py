"""``nxd-infer pipeline plan``: the partition, the bubble and the picture, and what does not fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.command import nxd_infer_here, refused
from tests.tiny_models import write_tiny

PICTURES = {
    "1f1b": ["rank 0  0 1 . .[0]  2[1]  3[2]  .[3]", "rank 1  . 0[0]  1[1]  2[2]  3[3]  . ."],
    "gpipe": ["rank 0  0 1 2 3 . . .[0] [1] [2] [3]", "rank 1  . 0 1 2 3[0] [1] [2] [3]  . ."],
    "zero-bubble": [
        "rank 0   0  1  . [0  2 [1 0] [2  3 1] 2] [3 3]",
        "rank 1   .  0 [0  1 [1  2 [2 0] 1]  3 [3 2] 3]",
    ],
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("model") / "llama", num_hidden_layers=4)


@pytest.mark.parametrize("schedule", PICTURES)
def test_a_plan(model_dir: Path, schedule: str, capsys, monkeypatch):
    options = ("--pp", 2, "--microbatches", 4, "--schedule", schedule)
    done = nxd_infer_here(capsys, monkeypatch, "pipeline", "plan", model_dir, *options)
    assert done.status == 0, done.err
    assert "model.embed_tokens ... model.layers." in done.out and "... lm_head" in done.out
    assert "pipeline_cuts: ['model.layers." in done.out
    (longer,) = re.findall(r"works (\S+)% longer than an equal share", done.out)
    (bubble,) = re.findall(rf"Expected bubble of {schedule} with 4 microbatches: (\S+)%", done.out)
    assert 0 <= float(longer) < 50 and 5 < float(bubble) < 50
    lines = [line.rstrip() for line in done.out.splitlines() if line.startswith("rank ")]
    assert lines == PICTURES[schedule]


def test_stages_of_ones_own_and_what_does_not_fit(model_dir: Path, capsys, monkeypatch):
    def plan(*options: object):
        return nxd_infer_here(capsys, monkeypatch, "pipeline", "plan", model_dir, *options)

    done = plan("--pp", 2, "--chunks", 2, "--cuts", "model.layers.0, model.layers.1,model.layers.2")
    assert done.status == 0 and "Expected bubble of interleaved with 8 microbatches" in done.out
    refused(plan("--pp", 8), "8 pipeline stages, but the model has 4 transformer layers: use at most 4")
    refused(plan("--cuts", "model.layers.9"), "the model has no module 'model.layers.9'; did you mean")
    refused(plan("--schedule", "zigzag"), "'1f1b', 'gpipe', 'interleaved', 'zero-bubble'")
