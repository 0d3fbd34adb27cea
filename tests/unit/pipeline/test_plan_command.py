"""``nxd-infer pipeline plan``: the partition, the bubble and the picture, and what does not fit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.e2e.command import here, refused
from tests.support.recipes.jobs import write
from tests.support.tiny_models import write_tiny

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
def test_a_plan(model_dir: Path, schedule: str):
    options = ("--pp", 2, "--microbatches", 4, "--schedule", schedule)
    done = here("pipeline", "plan", model_dir, *options)
    assert done.status == 0, done.err
    assert "model.embed_tokens ... model.layers." in done.out and "... lm_head" in done.out
    assert "pipeline_cuts: ['model.layers." in done.out
    (longer,) = re.findall(r"works (\S+)% longer than an equal share", done.out)
    (bubble,) = re.findall(rf"Expected bubble of {schedule} with 4 microbatches: (\S+)%", done.out)
    assert 0 <= float(longer) < 50 and 5 < float(bubble) < 50
    lines = [line.rstrip() for line in done.out.splitlines() if line.startswith("rank ")]
    assert lines == PICTURES[schedule]


def test_a_configuration_alone_and_a_recipe(model_dir: Path, tmp_path: Path):
    def plan(source: Path, *options: object) -> str:
        done = here("pipeline", "plan", source, *options)
        assert done.status == 0, done.err
        return done.out

    (tmp_path / "model").mkdir()
    config = tmp_path / "model/config.json"
    config.write_bytes((model_dir / "config.json").read_bytes())
    assert plan(config) == plan(model_dir, "--pp", 2, "--microbatches", 8)
    recipe = write(tmp_path, 4, "distributed_strategy:\n  pipeline_model_parallel_size: 2\n")
    found = plan(recipe)
    assert "Expected bubble of 1f1b with 2 microbatches" in found, "4 rows in microbatches of 1 over 2 replicas"
    assert found.split("Expected")[0] == plan(config).split("Expected")[0]
    assert "Expected bubble of interleaved with 4 micro" in plan(recipe, "--chunks", 2, "--microbatches", 4)
    refused(here("pipeline", "plan", tmp_path / "none"), "none/config.json")


def test_the_document_shows_what_the_command_prints(tmp_path: Path, monkeypatch):
    """For a model of TinyLlama's sizes."""
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_key_value_heads": 4}
    config = write_tiny("llama", tmp_path / "llama") / "config.json"
    raw = {**json.loads(config.read_text()), **sizes, "num_attention_heads": 32, "vocab_size": 32000, "head_dim": 64}
    config.write_text(json.dumps({**raw, "torch_dtype": "bfloat16", "dtype": "bfloat16"}))
    text = (Path(__file__).parents[3] / "docs/pipelines.md").read_text()
    ((options, shown),) = re.findall(r"\$ nxd-infer pipeline plan \./llama (.*)\n([^`]*)```", text)
    monkeypatch.chdir(tmp_path)
    done = here("pipeline", "plan", "./llama", *options.split())
    assert done.status == 0, done.err
    assert [line.strip() for line in done.out.splitlines() if line.strip()] == shown.strip().splitlines()


def test_stages_of_ones_own_and_what_does_not_fit(model_dir: Path):
    def plan(*options: object):
        return here("pipeline", "plan", model_dir, *options)

    done = plan("--pp", 2, "--chunks", 2, "--cuts", "model.layers.0, model.layers.1,model.layers.2")
    assert done.status == 0 and "Expected bubble of interleaved with 8 microbatches" in done.out
    refused(plan("--pp", 8), "8 pipeline stages, but the model has 4 transformer layers: use at most 4")
    refused(plan("--cuts", "model.layers.9"), "the model has no module 'model.layers.9'; did you mean")
    refused(plan("--schedule", "zigzag"), '"1f1b", "gpipe", "interleaved", "zero-bubble"')
