"""What is said before a job starts: a plan notes it, a training refuses it before it writes anything."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from nxd_infer.cli import recipe_plan
from nxd_infer.recipes import models
from nxd_infer.recipes.recipe import load
from nxd_infer.util import machine
from tests.support.e2e.command import ROOT, here, refused
from tests.support.tiny_models import write_tiny

RECIPE = """trainer: {devices: 2, max_steps: 1}
data:
  train_dir: ${stdlib:pydoc_data/topics.py}
  global_batch_size: 2
  tokenizer: {type: trained, vocab_size: 300}
model: {num_layers: 1, hidden_size: 8, num_attention_heads: 2}
precision: {type: fp32}
exp_manager:
  name: x
"""


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("data.train_dir", "none.jsonl", "= none.jsonl is not there: give a file, a folder of files"),
        ("data.val_dir", "empty", "= empty has no file of .json"),
        ("data.data_prefix", "[1.0, corpus]", "names corpus, but corpus.idx is not there"),
        ("data.tokenizer.type", "nowhere", "has no tokenizer: give the directory of a model"),
        ("exp_manager.resume_from_checkpoint", "nowhere", "= 'nowhere' is neither a folder of checkpoints nor"),
        ("exp_manager.files_to_copy", "[notes.txt]", "names notes.txt, which is not a file"),
    ],
)
def test_a_missing_file_is_named_by_its_key(tmp_path, monkeypatch, key, value, told):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("r.yaml").write_text(RECIPE)
    more = ["~data.train_dir"] if key == "data.data_prefix" else []
    plan = here("train", "r.yaml", "--check", f"{key}={value}", *more)
    assert plan.status == 0, plan.err
    (note,) = [line for line in plan.out.splitlines() if line.startswith("note: ")]
    where = "r.yaml:5: data.tokenizer" if "tokenizer" in key else f"command line: {key}"
    assert note.startswith(f"note: {where} ") and told in note
    done = here("train", "r.yaml", f"{key}={value}", *more)
    refused(done, note.removeprefix("note: "))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "r.yaml"]


def test_a_plan_of_data_that_cannot_be_trained_on_ends_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tiny("llama", Path("model"))
    Path("data.jsonl").write_text('{"text": "a", "stars": 5}\n')
    Path("r.yaml").write_text(RECIPE)
    done = here("train", "r.yaml", "--check", "data.train_dir=data.jsonl", "data.tokenizer.type=model")
    assert "parameters" in done.out
    refused(done, "stars")


def test_a_plan_is_printed_and_nothing_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = here("train", ROOT / "examples/recipes/llama3_70b.yaml", "--check")
    assert done.status == 0, done.err
    for word in ("70,553,706,496", "memory per rank", "tokens per step", "8,388,608", "estimated time", "Trainium 1"):
        assert word in done.out, (word, done.out)
    assert done.out.count("kv_replicator") == 1 and "no effect" in done.out
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_is_one_sentence(tmp_path):
    file, out = tmp_path / "recipe.yaml", ("--trace", tmp_path / "out")
    file.write_text(RECIPE.replace("max_steps:", "max_step:"))
    refused(here("train", file), f"{file}:1: trainer has no key 'max_step'", "max_steps")
    file.write_text(RECIPE + "trace: {max_len: 64}\n")
    refused(here("train", file), "trace.out is missing", "--trace OUT")
    refused(here("train", file, "data.seq_length=many", *out), "command line: data.seq_length must be a whole number")
    refused(here("train", file, "trainer.num_nodes=2", "data.global_batch_size=4", *out), "by torchrun or srun")


def test_a_processor_without_bfloat16_is_slow_at_it(tmp_path, monkeypatch):
    """There fp32 is the default, which is said, and another choice is advised against; a plan for a chip is not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipe_plan, "matmul_peak", lambda dtype: 3.456e9)
    monkeypatch.setattr(models, "has_accelerator", lambda: False)
    Path("r.yaml").write_text(RECIPE.replace("precision: {type: fp32}\n", "").replace("devices: 2", "devices: 1"))
    told = "precision.type is fp32 by default, because this processor has no bfloat16 instructions"

    def notes(*arguments: str) -> str:
        return here("train", "r.yaml", *arguments).out

    for features, slow in (({"avx2"}, True), ({"avx2", "avx512_bf16"}, False), ({"amx_bf16"}, False), (set(), False)):
        monkeypatch.setattr(machine, "cpu_features", partial(frozenset, features))
        assert (f"note: r.yaml: {told}" in notes("--check")) == slow
    monkeypatch.setattr(machine, "cpu_features", partial(frozenset, {"avx2"}))
    assert "40% of 0.00346 TFLOP/s per rank, this machine" in notes("--check")
    assert "note: command line: precision.type = bf16: fp32 is many" in notes("--check", "precision.type=bf16")
    loaded = load("r.yaml")
    assert models.dtypes(loaded.recipe).weights == torch.float32
    assert models.dtypes(loaded.recipe, here=False).weights == torch.bfloat16
    monkeypatch.setattr(machine, "cpu_features", partial(frozenset, {"avx512_bf16"}))
    assert models.dtypes(loaded.recipe).master_weights
    monkeypatch.setattr(machine, "cpu_features", partial(frozenset, {"avx2"}))
    assert told in notes("data.val_dir=nothing")  # a start, which ends here
    assert told not in notes("--check", "precision.type=fp32") + notes("--check", "--chip", "trn1")
