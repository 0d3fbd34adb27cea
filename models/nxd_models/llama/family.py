"""The Llama family's entry in the registry."""

from __future__ import annotations

from nxd_models.llama.config import read_config
from nxd_models.llama.model import CausalLM, tensor_parallel_plan
from nxd_models.serving.decoder_step import DecoderStep
from nxd_models.spec import ModelSpec, Task


class LlamaStep(DecoderStep, CausalLM):
    """One generation step of a decoder of the Llama family."""

    nxd_equal_ranks = True


LLAMA = ModelSpec(
    model_types=("llama", "mistral", "qwen2", "qwen3"),
    read_config=read_config,
    tasks={"generate": Task(CausalLM, LlamaStep, blocks="model.layers")},
    tensor_parallel_plan=tensor_parallel_plan,
    adapter_targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
)
