"""The GPT-NeoX family's entry in the registry."""

from __future__ import annotations

from nxd_infer.hugging_face.stored import StoredWeight
from nxd_models.gpt_neox.config import read_config
from nxd_models.gpt_neox.model import CausalLM, tensor_parallel_plan
from nxd_models.serving.decoder_step import DecoderStep
from nxd_models.spec import ModelSpec, Task


class NeoXStep(DecoderStep, CausalLM):
    """One generation step of a decoder of the GPT-NeoX family."""

    nxd_equal_ranks = True


GPT_NEOX = ModelSpec(
    model_types=("gpt_neox",),
    read_config=read_config,
    tasks={"generate": Task(CausalLM, NeoXStep, blocks="gpt_neox.layers")},
    tensor_parallel_plan=tensor_parallel_plan,
    stored_weights={"embed_out.weight": StoredWeight("lm_head.weight")},  # its name since transformers 5
    adapter_targets=("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
)
