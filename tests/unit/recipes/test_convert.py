"""Configurations of NeMo and of NeuronX-NeMo-Megatron become recipes that are valid; what has no place is listed."""

from __future__ import annotations

from nxd_infer.recipes.convert import as_yaml, convert
from nxd_infer.recipes.recipe import check
from nxd_infer.recipes.yaml_text import parse_yaml
from tests.support.e2e.command import here

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
