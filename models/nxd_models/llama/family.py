"""The entries of the Llama family in the registry: those with experts differ in how checkpoints hold these."""

from __future__ import annotations

from dataclasses import replace

from nxd_infer.hugging_face.stored import StackedWeight, StoredWeight
from nxd_models.llama.config import read_config
from nxd_models.llama.model import CausalLM, tensor_parallel_plan
from nxd_models.serving.decoder_step import DecoderStep
from nxd_models.spec import ModelSpec, Task


class LlamaStep(DecoderStep, CausalLM):
    """One generation step of a decoder of the Llama family."""

    nxd_equal_ranks = True


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")

LLAMA = ModelSpec(
    model_types=("llama", "mistral", "qwen2", "qwen3"),
    read_config=read_config,
    tasks={"generate": Task(CausalLM, LlamaStep, blocks="model.layers")},
    tensor_parallel_plan=tensor_parallel_plan,
    gives_hidden_states=True,
    adapter_targets=(*_ATTENTION, "gate_proj", "up_proj", "down_proj"),
)
_GATE_UP, _DOWN = (f"model.layers.*.mlp.experts.{name}_proj" for name in ("gate_up", "down"))
"""Under these names transformers 5 has all experts in one tensor; in files they usually are apart, as in version 4."""

MIXTRAL = replace(
    LLAMA,
    model_types=("mixtral",),
    stored_weights={
        "model.layers.*.mlp.gate.weight": StoredWeight("model.layers.*.block_sparse_moe.gate.weight"),
        _GATE_UP: StackedWeight("model.layers.*.block_sparse_moe.experts.0.w1.weight", below=("w3",)),
        _DOWN: StackedWeight("model.layers.*.block_sparse_moe.experts.0.w2.weight"),
    },
    adapter_targets=_ATTENTION,
)
QWEN3_MOE = replace(
    LLAMA,
    model_types=("qwen3_moe",),
    stored_weights={
        _GATE_UP: StackedWeight("model.layers.*.mlp.experts.0.gate_proj.weight", below=("up_proj",)),
        _DOWN: StackedWeight("model.layers.*.mlp.experts.0.down_proj.weight"),
    },
    adapter_targets=_ATTENTION,
)
