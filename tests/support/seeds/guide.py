"""The configuration of the wrapper guide, for the tests of one stage and of several."""

from __future__ import annotations

from typing import Any

import neuronx_distributed as nxd
from neuronx_distributed.parallel_layers import mappings

from tests.support.seeds.model import CoreAttention, LlamaDecoderLayer, LlamaRMSNorm


def guide_config(
    tp: int, pp: int, cuts: list[str], microbatches: int, zero1: bool, selective: bool, trace_file: str | None = None
) -> dict[str, Any]:
    return nxd.neuronx_distributed_config(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        pipeline_config={
            "transformer_layer_cls": LlamaDecoderLayer,
            "num_microbatches": microbatches,
            "output_loss_value_spec": (True, False),
            "input_names": ["input_ids", "attention_mask", "labels"],
            "pipeline_cuts": cuts,
            "trace_file_path": trace_file,
            "param_init_fn": None,
            "leaf_module_cls": [LlamaRMSNorm.__name__],
            "autowrap_modules": [mappings],
            "use_zero1_optimizer": zero1,
            "use_optimizer_wrapper": True,
        },
        optimizer_config={"zero_one_enabled": zero1, "grad_clipping": True, "max_grad_norm": 1.0},
        activation_checkpoint_config=CoreAttention if selective else "full",
    )
