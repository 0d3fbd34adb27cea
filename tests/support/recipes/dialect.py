"""Recipes as NxD Training's users write them, one per kind; ``write(folder)`` writes them and the files they name."""

from __future__ import annotations

import json
from pathlib import Path

TOP = """name: {name}
model_source: {source}
seed: 1234

trainer:
  devices: 32
  num_nodes: {nodes}
  max_epochs: -1
  max_steps: 10000
  log_every_n_steps: 10
  val_check_interval: 10000
  check_val_every_n_epoch: null
  limit_val_batches: 1
  gradient_clip_val: 1.0
{lnc}
exp_manager:
  create_tensorboard_logger: True
  explicit_log_dir: null
  name: {name}
  resume_if_exists: True
  create_checkpoint_callback: True
  checkpoint_callback_params:
    monitor: step
    save_top_k: 1
    mode: max
    save_last: False
    filename: '{name}--{{step}}-{{consumed_samples}}'
    model_parallel_size: ${{multiply:${{distributed_strategy.tensor_model_parallel_size}}, ${{distributed_strategy.pipeline_model_parallel_size}}}}
    every_n_train_steps: 200
    use_master_weights_in_ckpt: False
  log_parameter_norm: True
  save_xser: True
  async_checkpointing: False
  resume_from_checkpoint: null
  ckpt_ptl_version: "2.5.0"

distributed_strategy:
  tensor_model_parallel_size: {tp}
  pipeline_model_parallel_size: {pp}
  virtual_pipeline_model_parallel_size: {vpp}
  zero1: {zero1}
  sequence_parallel: True
{strategy}
"""  # noqa: E501

HF_DATA = """data:
  micro_batch_size: 1
  global_batch_size: {batch}
  train_dir: $HOME/examples_datasets/{name}
  val_dir: null
  dev_choose_samples: 2250
  seq_length: {length}
  tokenizer:
    type: $HOME/models/{config}
{data}
"""

MEGATRON_DATA = """data:
  micro_batch_size: 1
  global_batch_size: {batch}
  tokenizer:
    library: huggingface
    type: $HOME/models/llama
    merge_file: null
    sentencepiece_legacy: False
  data_prefix:
    - 1.0
    - $HOME/examples_datasets/book.jsonl-processed_text_document
  index_mapping_dir: null
  data_impl: mmap
  splits_string: 980,10,10
  seq_length: ${{model.encoder_seq_length}}
  num_workers: 1
  dataloader_type: single
  reset_position_ids: False
  eod_mask_loss: False
  no_seqlen_plus_one_input_tokens: False
{data}
"""

HF_MODEL = """model:
  model_config: {config}
  encoder_seq_length: {length}
  max_position_embeddings: ${{.encoder_seq_length}}
  num_layers: {layers}
  hidden_size: {hidden}
  qkv_linear: True
  fuse_qkv: True
  rope_theta: 500000.0
  use_cpu_initialization: True
  activations_checkpoint_granularity: {recompute}
  weight_init_only: True
  transpose_nki_inputs: True
"""

MEGATRON_MODEL = """model:
  encoder_seq_length: {length}
  max_position_embeddings: ${{.encoder_seq_length}}
  num_layers: {layers}
  hidden_size: {hidden}
  ffn_hidden_size: {inner}
  num_attention_heads: {heads}
  num_kv_heads: {groups}
  init_method_std: 0.021
  hidden_dropout: 0.0
  normalization: {norm}
  layernorm_epsilon: 1e-5
  make_vocab_size_divisible_by: 8
  share_embeddings_and_output_weights: False
  position_embedding_type: {positions}
  rotary_percentage: 1.0
  activation: {activation}
  transformer_block_type: pre_ln
  has_bias: {bias}
  use_cpu_initialization: True
  activations_checkpoint_granularity: {recompute}
  activations_checkpoint_recompute: [CoreAttention]
"""

OPTIM = """  fusions:
    softmax: True
    flash_attention: True
    ring_attention: {ring}
{more}
  do_layer_norm_weight_decay: False
  optim:
    name: {optimizer}
    lr: {lr}
    weight_decay: 0.01
    betas:
    - 0.9
    - 0.999
    sched:
      name: {schedule}
      warmup_steps: 100
      constant_steps: 0
      max_steps: ${{trainer.max_steps}}
      min_lr: 1e-5
"""

END = """
precision:
  type: {precision}
  # manual only
  master_weights: True
  fp32_grad_acc: True
  xla_use_bf16: '0'
  parallel_layers_reduce_dtype: bf16
{alignment}
compiler_flags: '--model-type transformer'
aync_exec_max_inflight_requests: 5
bucket_size_collectives: 1024
"""

SFT = "model_alignment_strategy:\n  sft:\n    packing: True\n"
PEFT = """  peft:
    lora_rank: 16
    lora_alpha: 32
    lora_dropout: 0.05
    lora_bias: "none"
    target_modules: ["qkv_proj"]
    merge_lora: False
    save_lora_config_adapter: True
"""
DPO = """model_alignment_strategy:
  dpo:
    kl_beta: 0.01
    loss_type: sigmoid
    max_prompt_length: 2048
    precompute_ref_log_probs: True
    truncation_mode: keep_start
"""
ORPO = "model_alignment_strategy:\n  orpo: {beta: 0.01, max_prompt_length: 2048, truncation_mode: keep_start}\n"
MOE = """  moe:
    num_experts: 8
    frequency: 1
    capacity_factor: {capacity}
    dropless: {dropless}
    routing_algorithm: top_k
    top_k: 2
    output_router_logits: True
    router_aux_loss_coef: 0.02
    normalize_top_k_affinities: True
    router_activation: softmax
"""

LLAMA3_8B = {"config": "llama3_8b.json", "layers": 32, "hidden": 4096}
DEFAULTS = {
    "source": "hf",
    "nodes": 4,
    "lnc": "",
    "tp": 32,
    "pp": 1,
    "vpp": 1,
    "zero1": "True",
    "strategy": "  kv_replicator: 4",
    "batch": 1024,
    "length": 8192,
    "data": "",
    "recompute": "selective",
    "ring": "False",
    "more": "",
    "optimizer": "adamw_fp32OptState",
    "lr": "1.5e-4",
    "schedule": "LinearAnnealingWithWarmUp",
    "precision": "mixed_precision",
    "alignment": "",
    "norm": "rmsnorm",
    "positions": "rope",
    "activation": "swiglu",
    "bias": "False",
    "inner": 11008,
    "heads": 32,
    "groups": 32,
    "config": "",
}
MEGATRON = {"source": "megatron", "optimizer": "adamw", "schedule": "CosineAnnealing", "strategy": ""}

LLAMA3_70B = {"config": "llama3_70b.json", "layers": 80, "hidden": 8192, "nodes": 16, "pp": 8}
KINDS: dict[str, dict] = {
    "hf_llama3_8B": {**LLAMA3_8B, "precision": "mixed_precisionSR"},
    "hf_llama3_8B_SFT_lora": {
        **LLAMA3_8B,
        "alignment": SFT + PEFT,
        "batch": 64,
        "zero1": "False",
        "precision": "autocast",
        "data": "  use_sft_style_data_module: True",
    },
    "hf_llama3_8B_DPO": {**LLAMA3_8B, "alignment": DPO, "batch": 64, "lr": "5e-7", "lnc": "  lnc: 2"},
    "hf_llama3_8B_ORPO": {**LLAMA3_8B, "alignment": ORPO, "batch": 64, "lr": "5e-6"},
    "hf_llama3_8B_CP": {**LLAMA3_8B, "tp": 8, "strategy": "  context_parallel_size: 4", "ring": "True"},
    "hf_llama3_70B": {**LLAMA3_70B, "recompute": "full"},
    "hf_llama3_70B_SFT": {**LLAMA3_70B, "vpp": 2, "alignment": SFT},
    "hf_mistral_7B": {"config": "mistral_7b.json", "layers": 32, "hidden": 4096, "more": "  sliding_window_size: 4096"},
    "hf_mixtral_8x7B": {
        "config": "mixtral_8x7b.json",
        "layers": 32,
        "hidden": 4096,
        "more": MOE.format(capacity="2.0", dropless="False"),
        "strategy": "  expert_model_parallel_size: 2\n  token_shuffle_group_size: 8",
        "tp": 16,
    },
    "megatron_llama_70B": {
        **MEGATRON, "layers": 80, "hidden": 8192, "inner": 28672, "heads": 64, "groups": 8, "pp": 8, "nodes": 16,
        "length": 4096, "precision": "bf16SR",
        "strategy": "  kv_replicator: 4",
    },
    "megatron_gpt_6.7B": {
        **MEGATRON, "layers": 32, "hidden": 4096, "inner": 16384, "length": 2048, "tp": 8, "precision": "manual",
        "norm": "layernorm", "positions": "learned_absolute", "activation": "gelu", "bias": "True",
    },
    "megatron_mixtral_8x7B": {
        **MEGATRON, "layers": 32, "hidden": 4096, "inner": 14336, "groups": 8, "length": 4096, "precision": "fp32",
        "more": MOE.format(capacity="0.0", dropless="True"), "strategy": "  expert_model_parallel_size: 1",
    },
}  # fmt: skip

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
CONFIGS = {
    "llama3_8b.json": LLAMA,
    "llama3_70b.json": {
        **LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80,
    },
    "mistral_7b.json": {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "vocab_size": 32000},
    "mixtral_8x7b.json": {**LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"]},
}  # fmt: skip


def text_of(name: str) -> str:
    values = {**DEFAULTS, **KINDS[name], "name": name}
    data, model = (HF_DATA, HF_MODEL) if values["source"] == "hf" else (MEGATRON_DATA, MEGATRON_MODEL)
    return "".join(block.format(**values) for block in (TOP, data, model, OPTIM, END))


def write(folder: Path) -> dict[str, Path]:
    """Write all recipes and what they name; return the files by kind."""
    for name, config in CONFIGS.items():
        (folder / name).write_text(json.dumps(config))
    found = {}
    for name in KINDS:
        found[name] = folder / f"{name}.yaml"
        found[name].write_text(text_of(name))
    return found
