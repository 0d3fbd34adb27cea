"""Configurations of NxD Training's users and ours are read, those of NeMo converted; a mistake is one sentence."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import MixtralConfig

from nxd_infer.cli.train import trace_arguments
from nxd_infer.errors import RecipeError
from nxd_infer.recipes.convert import as_yaml, convert
from nxd_infer.recipes.models import obstacles
from nxd_infer.recipes.plan import Plan, plan_of
from nxd_infer.recipes.recipe import Loaded, check, load
from nxd_infer.recipes.schema import Recipe
from nxd_infer.recipes.yaml_text import parse_yaml
from tests.support.e2e.command import ROOT, here

HF_8B, HF_70B = (ROOT / f"examples/recipes/llama3_{size}.yaml" for size in ("8b", "70b"))
MEGATRON = ROOT / "tests/support/recipes/megatron.yaml"
LORA = "{lora_rank: 16, lora_bias: none, target_modules: [qkv_proj], merge_lora: False, save_lora_config_adapter: True}"
MOE = "{num_experts: 8, frequency: 1, capacity_factor: 0.0, dropless: True, top_k: 2, router_activation: softmax}"
ONE_STAGE = ["distributed_strategy.pipeline_model_parallel_size=1", "model.num_layers=32", "model.hidden_size=4096"]
KINDS = {
    "llama3_8b": (HF_8B, [], 8.03),
    "llama3_70b": (HF_70B, [], 70.55),
    "lora": (HF_8B, [f"model_alignment_strategy={{sft: {{packing: True}}, peft: {LORA}}}"], 8.03),
    "dpo": (HF_8B, ["model_alignment_strategy.dpo={kl_beta: 0.01, loss_type: sigmoid, max_prompt_length: 2048}"], 8.03),
    "llama_70b": (MEGATRON, ["model.vocab_size=32000"], 68.98),
    "mixtral": (
        MEGATRON,
        [*ONE_STAGE, f"model.moe={MOE}", "model.ffn_hidden_size=14336", "model.num_attention_heads=32",
         "model.vocab_size=32000"],
        46.7,
    ),
    "gpt": (
        MEGATRON,
        [*ONE_STAGE, "model.ffn_hidden_size=16384", "model.num_attention_heads=32", "model.num_kv_heads=32",
         "model.activation=gelu", "model.normalization=layernorm", "model.position_embedding_type=learned_absolute",
         "model.vocab_size=32000"],
        6.7,
    ),
}  # fmt: skip
"""What users of NxD Training train: the file, what differs, and the billions of parameters."""


def loaded(name: str, *more: str) -> Loaded:
    file, overrides, _ = KINDS[name]
    return load(file, [*overrides, *more])


@pytest.mark.parametrize("name", KINDS)
def test_a_users_recipe_is_read_and_its_plan_counts_the_parameters(name):
    recipe = loaded(name)
    assert recipe.recipe.model.optim.sched is not None and recipe.recipe.model.optim.sched.max_steps == 10000
    unused = {key for keys in recipe.unused.values() for key in keys}
    assert {"aync_exec_max_inflight_requests", "compiler_flags", "model.fusions.softmax"} <= unused
    assert not unused & {"trainer.max_steps", "data.seq_length", "model.optim.lr", "precision.type"}
    plan = plan_of(recipe, "trn1")
    assert plan.parameters / 1e9 == pytest.approx(KINDS[name][2], rel=0.01)
    degrees = plan.degrees["tp"] * plan.degrees["pp"]
    assert plan.world == degrees * plan.degrees["dp"] and plan.weights >= 2 * plan.parameters / degrees
    there = recipe.tree.values["exp_manager"]["checkpoint_callback_params"]["model_parallel_size"]
    assert there == recipe.recipe.distributed_strategy.pipeline_model_parallel_size * 32 == degrees


OTHER_PLACES = """name: llama
trainer: {devices: 2, max_steps: 1}
data: {train_dir: x, seq_length: 4096, global_batch_size: 2, alignment_strategy: {dpo: {max_prompt_length: 2048}}}
model:
  encoder_seq_length: 8192
  max_position_embeddings: ${.encoder_seq_length}
  moe: {num_experts: 8, top_k: 2, sinkhorn_tol: None, capacity_factor: None}
"""


def test_keys_of_nxd_training_that_two_sections_have():
    """The data's length stands, their strategy is the model's, and None is null."""
    read = check(parse_yaml(OTHER_PLACES, "r.yaml"))
    assert read.recipe.seq_length == 4096 and read.recipe.model.max_position_embeddings == 8192
    assert read.unused["data.seq_length says how long rows are"] == ["model.encoder_seq_length"]
    assert read.recipe.model_alignment_strategy.dpo is not None
    assert read.recipe.model.moe is not None and read.recipe.model.moe.capacity_factor == 0


def test_a_run_that_is_shortened_by_the_command_may_be_all_warmup():
    text = "trainer: {max_steps: 9}\ndata: {train_dir: x}\nmodel: {optim: {sched: {warmup_steps: 4}}}\n"
    read = check(parse_yaml(text, "r.yaml"), ["trainer.max_steps=2"])
    assert read.recipe.trainer.max_steps == 2
    with pytest.raises(RecipeError, match=r"r\.yaml:3: model\.optim\.sched\.warmup_steps = 4 is above the 2 steps"):
        check(parse_yaml(text.replace("9", "2"), "r.yaml"))


def test_a_trained_model_is_served_by_the_recipes_name():
    read = check(parse_yaml("name: mine\ntrainer: {max_steps: 9}\ndata: {train_dir: x}\n", "r.yaml"))
    traced = trace_arguments(read, Path("out"))
    assert traced is not None and traced["model_name"] == "mine"


def test_what_cannot_be_trained_here_is_said():
    dropping = ("model.moe.capacity_factor=1.2", "model.moe.dropless=false")
    sequences = ("distributed_strategy.context_parallel_size=4", "distributed_strategy.tensor_model_parallel_size=8")
    for name, more, word in (
        ("gpt", (), "rope"),
        ("mixtral", dropping, "experts"),
        ("llama3_8b", sequences, "sequences"),
    ):
        found = obstacles(loaded(name, *more))
        assert any(word in one and re.search(r"(\.yaml:\d+|command line): ", one) for one in found), found
    assert not any(obstacles(loaded(name)) for name in ("lora", "dpo", "llama_70b", "mixtral"))


MIXTURE = """name: mixture
trainer: {{devices: 4, max_steps: 1}}
distributed_strategy: {{expert_model_parallel_size: {ep}, zero1: {zero1}}}
data: {{train_dir: x, seq_length: 16, global_batch_size: 4}}
model: {{model_config: {folder}, {moe}}}
precision: {{type: fp32}}
"""


@pytest.mark.parametrize("moe", ["", "moe: {num_experts: 4, top_k: 2}"], ids=["counted", "formula"])
def test_experts_are_counted_where_they_are(moe: str, tmp_path: Path):
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    MixtralConfig(vocab_size=64, num_hidden_layers=2, num_local_experts=4, **sizes).save_pretrained(tmp_path)

    def plan(ep: int, zero1: bool) -> Plan:
        return plan_of(check(parse_yaml(MIXTURE.format(ep=ep, zero1=zero1, moe=moe, folder=tmp_path), "r.yaml")))

    half = 4 * 2 * (3 * 32 * 24 * 4) / 2  # float32, two layers
    alone, shared = (plan(ep, zero1=False) for ep in (1, 2))
    assert alone.parameters == shared.parameters
    for name, copies in (("weights", 1), ("gradients", 1), ("optimizer", 2)):
        assert getattr(alone, name) - getattr(shared, name) == copies * half
    assert plan(1, zero1=True).optimizer == plan(2, zero1=True).optimizer == alone.optimizer / 4


def test_its_plan_counts_the_adapters():
    width, keys, layers, rank = 4096, 1024, 32, 16
    trained = layers * rank * (3 * width + width + 2 * keys)  # of queries, keys and values
    assert plan_of(loaded("lora"), "trn1").trained == trained


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


@pytest.mark.parametrize("original", [HF_8B, MEGATRON], ids=["hf", "megatron"])
def test_each_mistake_is_one_sentence_with_key_line_and_the_nearest(tmp_path, original):
    lines, file = original.read_text().split("\n"), tmp_path / "broken.yaml"
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


PAGE = (ROOT / "docs/recipes.md").read_text()
EXAMPLES = sorted(path.name for path in (ROOT / "examples/recipes").glob("*.yaml"))


def test_the_command_lists_the_keys():
    shown = here("train", "--keys").out
    assert "| · `max_steps` | `-1` | steps to train, over all starts of the job; -1 without a limit |" in shown
    assert all(f"| `{one.name}` |" in shown for one in fields(Recipe))


def test_the_example_in_the_text_is_a_recipe(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    loaded = check(parse_yaml(PAGE.split("```yaml\n")[1].split("```")[0], "page.yaml"))
    assert loaded.recipe.exp_manager.name == "my_model" and loaded.recipe.data.train_dir == "/home/me/data/train.jsonl"
    assert loaded.recipe.model.optim.lr == 3e-4 and loaded.unused == {}


def test_the_examples_are_recipes():
    assert EXAMPLES == ["dpo.yaml", "llama3_70b.yaml", "llama3_8b.yaml", "lora.yaml", "pretrain.yaml", "sft.yaml"]
    for name in EXAMPLES:
        load(ROOT / "examples/recipes" / name)


NEURONX_NEMO_MEGATRON = """name: megatron_llama
restore_from_path: null
trainer:
  devices: 32
  num_nodes: 4
  accelerator: tpu
  precision: 32
  logger: False
  replace_sampler_ddp: False
  max_steps: 10000
  accumulate_grad_batches: 1
  gradient_clip_val: 1.0
exp_manager:
  name: megatron_llama
  wandb_logger_kwargs: {project: null, name: null}
  checkpoint_callback_params:
    model_parallel_size: ${multiply:${model.tensor_model_parallel_size}, ${model.pipeline_model_parallel_size}}
model:
  micro_batch_size: 1
  global_batch_size: 1024
  rampup_batch_size: null
  tensor_model_parallel_size: 8
  pipeline_model_parallel_size: 1
  encoder_seq_length: 4096
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 11008
  num_attention_heads: 32
  kv_channels: null
  layernorm_epsilon: 1e-5
  tokenizer: {library: huggingface, type: $HOME/llamav2_weights, model: null}
  megatron_amp_O2: False
  grad_allreduce_chunk_size_mb: 125
  seed: 1234
  onnx_safe: False
  sequence_parallel: True
  wrap_with_zero: True
  data:
    data_prefix: [1.0, $HOME/book.jsonl-processed_text_document]
    splits_string: 980,10,10
    seq_length: ${model.encoder_seq_length}
  nsys_profile: {enabled: False, ranks: [0]}
  optim:
    name: adamw
    lr: 3e-4
    capturable: True
    betas: [0.9, 0.95]
    sched: {name: CosineAnnealing, warmup_steps: 2000, min_lr: 3.0e-5}
"""
NEMO = """name: megatron_gpt
trainer: {devices: 8, num_nodes: 1, accelerator: gpu, precision: bf16-mixed, max_steps: 100, gradient_clip_val: 1.0}
model:
  mcore_gpt: True
  micro_batch_size: 2
  global_batch_size: 16
  tensor_model_parallel_size: 2
  encoder_seq_length: 2048
  num_layers: 24
  hidden_size: 2048
  num_attention_heads: 32
  num_query_groups: 8
  rotary_base: 500000
  bias: False
  transformer_engine: True
  data: {train_ds: /data/train.jsonl, seq_length: 2048}
  peft: {lora_tuning: {adapter_dim: 32, alpha: 32, adapter_dropout: 0.0}}
  optim: {name: distributed_fused_adam, lr: 1e-4, bucket_cap_mb: 125}
"""


def test_neuronx_nemo_megatron():
    recipe, left_out = convert(parse_yaml(NEURONX_NEMO_MEGATRON, "old.yaml"))
    loaded = check(parse_yaml(as_yaml(recipe, left_out), "new.yaml"))
    found = loaded.recipe
    assert found.data.global_batch_size == 1024 and found.data.seq_length == 4096
    assert found.distributed_strategy.tensor_model_parallel_size == 8 and found.distributed_strategy.zero1
    assert found.model.optim.lr == 3e-4 and found.model.layernorm_epsilon == 1e-5
    assert found.data.tokenizer.type is not None and found.data.tokenizer.type.endswith("llamav2_weights")
    assert loaded.tree.values["exp_manager"]["checkpoint_callback_params"]["model_parallel_size"] == 8
    assert found.precision.type == "fp32" and found.seed == 1234
    names = {line.split(": ")[1].split(" = ")[0] for line in left_out}
    assert names == {
        "model.rampup_batch_size", "model.megatron_amp_O2", "model.grad_allreduce_chunk_size_mb", "model.onnx_safe",
        "model.nsys_profile.enabled", "model.nsys_profile.ranks",
    }  # fmt: skip
    number = NEURONX_NEMO_MEGATRON.split("\n").index("  rampup_batch_size: null") + 1
    assert left_out[0] == f"old.yaml:{number}: model.rampup_batch_size = None"


def test_nemo_by_the_command(tmp_path):
    (tmp_path / "old.yaml").write_text(NEMO)
    done = here("train", tmp_path / "old.yaml", "--convert")
    found = check(parse_yaml(done.out, "printed")).recipe
    assert found.name == "megatron_gpt"
    assert found.precision.type == "mixed_precision" and found.model.optim.name == "adamw"
    assert found.model.num_kv_heads == 8 and found.model.rope_theta == 500000 and found.model.has_bias is False
    assert found.data.train_dir == "/data/train.jsonl"
    assert found.model_alignment_strategy.peft is not None and found.model_alignment_strategy.peft.lora_rank == 32
    assert f"# left out, {tmp_path / 'old.yaml'}:4: model.mcore_gpt = True" in done.out
    assert done.out.count("# left out, ") == 3


def test_arguments_that_would_change_nothing_are_refused(tmp_path):
    (tmp_path / "old.yaml").write_text(NEMO)
    for more, told in (
        (("--convert", "trainer.max_steps=3"), "it prints CONFIG as it is"),
        (("--convert", "--check"), "it prints CONFIG as it is"),
        (("--chip", "trn1"), "the device of --check's plan"),
    ):
        done = here("train", tmp_path / "old.yaml", *more)
        assert done.status == 2 and told in " ".join(done.err.split()), done.err
