"""Every configuration of NxD Training's users is read as it is; a mistake in it is one sentence with its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nxd_infer.errors import RecipeError
from nxd_infer.recipes.models import obstacles
from nxd_infer.recipes.plan import plan_of
from nxd_infer.recipes.recipe import load
from tests.support.recipes.dialect import KINDS, write


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    return write(tmp_path_factory.mktemp("dialect"))


@pytest.mark.parametrize("name", KINDS)
def test_it_is_read_with_its_values(files, name):
    loaded = load(files[name])
    recipe = loaded.recipe
    assert recipe.name == name
    assert recipe.model.optim.sched is not None and recipe.model.optim.sched.max_steps == recipe.trainer.max_steps
    assert recipe.model.optim.sched.min_lr == 1e-5
    strategy = recipe.distributed_strategy
    degrees = strategy.tensor_model_parallel_size * strategy.pipeline_model_parallel_size
    assert loaded.tree.values["exp_manager"]["checkpoint_callback_params"]["model_parallel_size"] == degrees
    assert recipe.model.max_position_embeddings == recipe.model.encoder_seq_length
    unused = {key for keys in loaded.unused.values() for key in keys}
    assert {"aync_exec_max_inflight_requests", "compiler_flags", "model.fusions.softmax"} <= unused
    assert not unused & {"trainer.max_steps", "data.seq_length", "model.optim.lr", "precision.type"}


BILLIONS = {
    "hf_llama3_8B": 8.03,
    "hf_llama3_70B": 70.55,
    "hf_mistral_7B": 7.24,
    "megatron_mixtral_8x7B": 46.7,
    "megatron_gpt_6.7B": 6.7,
}


@pytest.mark.parametrize("name", BILLIONS)
def test_its_plan_counts_the_parameters(files, name):
    plan = plan_of(load(files[name], [f"model.vocab_size={32000}"] if name.startswith("megatron") else []), "trn1")
    assert plan.parameters / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)
    assert plan.world == plan.degrees["tp"] * plan.degrees["pp"] * plan.degrees["dp"]
    assert plan.weights >= 2 * plan.parameters / (plan.degrees["tp"] * plan.degrees["pp"])


def test_what_cannot_be_trained_here_is_said(files):
    for name, word in (("megatron_gpt_6.7B", "rope"), ("hf_mixtral_8x7B", "experts"), ("hf_llama3_8B_CP", "sequences")):
        found = obstacles(load(files[name]))
        assert any(word in one and re.search(r"\.yaml:\d+: ", one) for one in found), found
    for name in ("hf_llama3_8B_SFT_lora", "hf_llama3_8B_DPO", "megatron_llama_70B"):
        assert obstacles(load(files[name])) == []


def test_its_plan_counts_the_adapters(files):
    plan = plan_of(load(files["hf_llama3_8B_SFT_lora"], ["model.vocab_size=32000"]), "trn1")
    width, keys, layers, rank = 4096, 1024, 32, 16
    assert plan.trained == layers * rank * (3 * width + width + 2 * keys)  # of queries, keys and values


BROKEN = [
    ("  max_steps:", "  max_stepps:", "max_stepps", "the nearest is max_steps"),
    ("^exp_manager:", "exp_manger:", "exp_manger", "the nearest is exp_manager"),
    ("warmup_steps:", "warmup_step:", "warmup_step", "the nearest is warmup_steps"),
    ("^  type: (mixed|bf16).*", "  type: mixed_precison", "precision.type", "mixed_precision"),
    ("global_batch_size: .*", "global_batch_size: 1023", "data.global_batch_size", r"the nearest is \d+"),
    ("tensor_model_parallel_size: .*", "tensor_model_parallel_size: 30", "tensor_model_parallel_size", "nearest is 32"),
    (r"\$\{trainer.max_steps\}", "${trainer.max_step}", "sched.max_steps", "the nearest is trainer.max_steps"),
    ("micro_batch_size: .*", "micro_batch_size: 0", "data.micro_batch_size", "the nearest is 1"),
    ("  num_nodes: .*", "  num_nodes: many", "trainer.num_nodes", "a whole number"),
]
"""What the first line that has a pattern becomes; the key that the error names, and what it says."""


@pytest.mark.parametrize("name", ["hf_llama3_8B", "megatron_llama_70B"])
def test_each_mistake_is_one_sentence_with_key_line_and_the_nearest(files, name):
    lines, file = files[name].read_text().split("\n"), files[name].with_name(f"broken_{name}.yaml")
    for pattern, replacement, key, near in BROKEN:
        number = next(place for place, one in enumerate(lines) if re.search(pattern, one))
        changed = re.sub(pattern, replacement, lines[number])
        file.write_text("\n".join([*lines[:number], changed, *lines[number + 1 :]]))
        with pytest.raises(RecipeError) as told:
            load(file)
        message = str(told.value)
        assert message.startswith(f"{file}:{number + 1}: "), (changed, message)
        assert key in message and re.search(near, message), (changed, message)
        assert "\n" not in message and ". " not in message.removeprefix(str(file)), message
