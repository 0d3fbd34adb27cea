"""What docs/recipes.md says is so."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nxd_infer.context import make_context, use_context
from nxd_infer.recipes.loop import train
from nxd_infer.recipes.recipe import load
from tests.support.e2e.command import ROOT, here
from tests.support.tiny_models import VOCAB_SIZE, write_tiny

PAGE = (ROOT / "docs/recipes.md").read_text()
VOCABULARY = 2048
"""Of pretrain.yaml's tokenizer."""


@pytest.fixture(scope="module")
def commands() -> list[list[str]]:
    """Those that the page begins with."""
    lines = PAGE.split("```console\n")[1].split("```")[0].splitlines()
    return [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]


@pytest.fixture(scope="module")
def pretrained(commands, tmp_path_factory):
    """A folder in which the commands of the examples have run so far, on few steps and a part of the data."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "examples").symlink_to(ROOT / "examples")
    subprocess.run([sys.executable, *commands[1][1:]], check=True, capture_output=True, timeout=300, cwd=folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        losses_of_two_steps("pretrain")
    return folder


def test_the_first_commands_can_be_followed(pretrained, commands, monkeypatch):
    """As they stand, where the examples are: the data is written, the plan misses nothing, the others are recipes."""
    monkeypatch.chdir(pretrained)
    _, _, *training, serve = commands
    for program, command, recipe, *arguments in training:
        assert (program, command) == ("nxd-infer", "train")
        load(recipe, [one for one in arguments if "=" in one])
    plan = here(*training[0][1:])
    assert training[0][-1] == "--check" and plan.status == 0 and "is not there" not in plan.out
    assert serve == ["nxd-infer", "serve", training[-1][-1]]
    for kind, columns in (
        ("pretrain", {"text"}),
        ("sft", {"prompt", "completion"}),
        ("dpo", {"prompt", "chosen", "rejected"}),
    ):
        for part in (f"{kind}.jsonl", f"{kind}.val.jsonl"):
            rows = [json.loads(line) for line in (pretrained / "data" / part).read_text().splitlines()]
            assert len(rows) >= 4 and all(set(row) == columns for row in rows)


@pytest.mark.parametrize("name", ["sft", "lora", "dpo"])
def test_the_examples_train(pretrained, monkeypatch, name):
    """On the data that the script has written, from where pretrain.yaml ended."""
    monkeypatch.chdir(pretrained)
    first, second = losses_of_two_steps(name)
    if name == "dpo":
        assert first == pytest.approx(math.log(2), abs=1e-4) and second < first  # the reference is the model itself
    else:
        assert first < math.log(VOCABULARY) - 0.1  # what a new model has


def test_the_files_of_an_experiment_are_those_of_the_page(pretrained):
    folder = pretrained / "experiments/python_pretrain"
    found = {path.name for path in [*folder.iterdir(), *(folder / "version_0").iterdir()]}
    section = PAGE.split("## Experiments")[1].split("## ")[0]
    listed = re.findall(r"^\| `(version_0)?/?([\w.]+)` \|", section, re.MULTILINE)
    names = {name for _, name in listed}
    found = {re.sub(r"tfevents\..*", "tfevents...", name) for name in found}
    assert names - found == {"ranks.log", "reference.safetensors"} and found - names == {"version_0"}


def losses_of_two_steps(name: str) -> list[float]:
    """Train an example on one rank and a part of its data."""
    few = ["trainer.max_steps=2", "model.optim.sched.warmup_steps=0", "trainer.log_every_n_steps=1"]
    alone = ["trainer.devices=1", "distributed_strategy.tensor_model_parallel_size=1", "data.dev_choose_samples=100"]
    plain = ["precision.type=fp32"]  # most processors are slow at bfloat16
    with use_context(make_context()):
        log_dir = train(load(ROOT / f"examples/recipes/{name}.yaml", [*few, *alone, *plain])).log_dir
    return [scalar.value for scalar in EventAccumulator(str(log_dir)).Reload().Scalars("loss")]


def test_a_model_of_ones_own_trains(tmp_path):
    """Packed, in microbatches: so its mask, its positions and its number of items are used."""
    write_tiny("llama", tmp_path / "tokenizer")
    rows = [{"prompt": f"{n} and {n}? ", "completion": f"{2 * n}"} for n in range(64)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "architectures": ["TinyGPT"], "model_type": "tiny_gpt", "vocab_size": VOCAB_SIZE, "hidden_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "recipe.yaml").write_text(
        "trainer: {max_steps: 6}\n"
        "exp_manager: {exp_dir: exp}\n"
        "data: {train_dir: data.jsonl, seq_length: 64, micro_batch_size: 1, global_batch_size: 2,\n"
        "  tokenizer: {type: tokenizer}}\n"
        "model: {model_config: config.json, optim: {lr: 1e-2}}\n"
        "precision: {type: fp32}\n"
        "model_alignment_strategy: {sft: {packing: true}}\n"
    )
    script = ROOT / "examples/recipes/own_model.py"
    done = subprocess.run(
        [sys.executable, str(script), "recipe.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "trained: exp/default/version_0/checkpoints" in done.stdout
    first, *_, last = [float(line.split("loss ")[1].split()[0]) for line in done.stderr.splitlines() if "loss " in line]
    assert last < first
