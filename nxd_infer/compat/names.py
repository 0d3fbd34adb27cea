"""The table of old names: where each name of neuronx_distributed and torch_neuronx is here.

A module that is not listed has the same path here, with all its names. Sorted by path, and names within a module too.
``nxd-infer port`` and docs/migration.md read the same table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ROOTS: dict[str, str | None] = {
    "neuronx_distributed": "nxd_infer",
    "neuronxcc": None,
    "optimum.neuron": None,
    "torch_neuronx": "nxd_infer.compat.torch_neuronx",
    "torch_xla": None,
}
"""Packages whose names are answered, and ours that has the same paths below it (None: what is listed, no more)."""


@dataclass(frozen=True)
class Module:
    """One module of an old package."""

    ours: str | None = None
    """The module here whose names it has as well (default: the one of the same path, if there is one)."""
    names: Mapping[str, str] = field(default_factory=dict)
    """An old name and ``"nxd_infer.module:attribute"`` (``"nxd_infer.module"``: the attribute has the same name)."""
    device: Mapping[str, str] = field(default_factory=dict)
    """A name that has no place here, most for a Neuron device only, and what to call instead. Using it raises."""
    differs: Mapping[str, str] = field(default_factory=dict)
    """An old name, and how it behaves otherwise here."""


_KERNEL = "call nki_flash_attn_func, or scaled_dot_product_attention"
_PLAIN = "write it in plain PyTorch, which a backend compiles"
_KV = "GQAQKVColumnParallelLinear replicates key and value heads itself"
_EXPERTS = "settings of the blockwise kernel change nothing"
_BUILDER = "nxd_infer.compat.model_builder"
_FIRST_BUILDER = "compiler arguments of all keys are joined; torch.jit.save(model, path) makes a directory"
_NXD_MODEL = "save() writes a directory; all ranks run on this host"
_UTILITIES = "nxd_infer.compat.utilities"

OLD: dict[str, Module] = {
    "neuronx_distributed": Module(
        names={
            "ModelBuilder": f"{_BUILDER}.functions",
            "NxDModel": f"{_BUILDER}.nxd_model",
            "NxDParallelState": f"{_BUILDER}.parallel_context",
            "shard_checkpoint": f"{_BUILDER}.shards",
        },
        differs={"NxDModel": _NXD_MODEL},
    ),
    "neuronx_distributed.kernels.flash_attn": Module(
        names={"nki_flash_attn_func": "nxd_infer.compat.attention"},
        differs={"nki_flash_attn_func": "is computed by PyTorch's scaled_dot_product_attention, on any device"},
    ),
    "neuronx_distributed.kernels.ring_attention_kernel": Module(
        names={"nki_ring_attn_func": "nxd_infer.compat.attention"},
        differs={"nki_ring_attn_func": "gathers keys and values instead of passing them around the ring"},
    ),
    "neuronx_distributed.modules.attention.utils": Module("nxd_infer.compat.attention"),
    "neuronx_distributed.modules.lora.layer": Module("nxd_infer.modules.lora.layers"),
    "neuronx_distributed.modules.moe.blockwise": Module(
        device=dict.fromkeys(
            ("BlockwiseMatmulNKIFunc", "TorchBlockwiseTraining", "can_use_blockwise_matmul_nki"),
            "ExpertMLPs itself computes dropless experts",
        )
    ),
    "neuronx_distributed.modules.moe.expert_mlps": Module(differs={"ExpertMLPs": _EXPERTS}),
    "neuronx_distributed.modules.moe.expert_mlps_v2": Module(differs={"ExpertMLPsV2": _EXPERTS}),
    "neuronx_distributed.modules.moe.model_utils": Module(
        names={"ACT2FN": "nxd_infer.modules.activations:ACTIVATIONS", "GLUType": "nxd_infer.modules.moe.moe_configs"}
    ),
    "neuronx_distributed.modules.moe.moe_configs": Module(
        device={"MoEFusedTKGConfig": "leave it out: MoE itself decodes"}
    ),
    "neuronx_distributed.modules.moe.moe_process_group": Module(
        device=dict.fromkeys(
            ("get_moe_ep_group", "get_moe_tp_ep_group", "init_tensor_expert_parallel_moe_process_groups"),
            "initialize_model_parallel(expert_model_parallel_size=) makes the groups, one set for prompts and decoding",
        )
    ),
    "neuronx_distributed.modules.qkv_linear": Module(device={"get_kv_shared_group": _KV}),
    "neuronx_distributed.operators.argmax": Module(names={"argmax": "nxd_infer.parallel_layers.search"}),
    "neuronx_distributed.operators.topk": Module(names={"topk": "nxd_infer.parallel_layers.search"}),
    "neuronx_distributed.optimizer": Module(
        names={"NeuronEPZero1Optimizer": "nxd_infer.optimizer:NeuronZero1Optimizer"}
    ),
    "neuronx_distributed.parallel_layers.checkpointing": Module(
        names={
            "NXD_SKIP_RENDEZVOUS": _UTILITIES,
            "_invoke_preshard_hook": f"{_BUILDER}.shards:invoke_preshard_hook",
        }
    ),
    "neuronx_distributed.parallel_layers.comm": Module(
        names=dict.fromkeys(("all_gather", "all_reduce", "reduce_scatter"), "nxd_infer.compat.torch_xla.xla_model")
    ),
    "neuronx_distributed.parallel_layers.parallel_state": Module(
        "nxd_infer.parallel_state",
        names=dict.fromkeys(("get_gloo_group", "rmsg"), _UTILITIES),
        device=dict.fromkeys(
            ("get_kv_shared_group", "get_kv_shared_group_size", "get_kv_shared_replica_groups", "initialize_kv_group"),
            _KV,
        ),
    ),
    "neuronx_distributed.parallel_layers.random": Module(
        names={"_MODEL_PARALLEL_RNG_TRACKER_NAME": "nxd_infer.parallel_layers.random:MODEL_PARALLEL_RNG"}
    ),
    "neuronx_distributed.parallel_layers.utils": Module(
        names=dict.fromkeys(
            ("is_pjrt_device", "is_torch_version_greater_than_2", "requires_init_pg_override"), _UTILITIES
        )
    ),
    "neuronx_distributed.pipeline.comm": Module(
        names={"rmsg": _UTILITIES},
        device=dict.fromkeys(
            ("recv_from", "recv_python_object", "send", "send_python_object"),
            "torch.distributed has them",
        ),
    ),
    "neuronx_distributed.pipeline.partition": Module(
        device=dict.fromkeys(
            (
                "analyze_pipeline_module",
                "analyze_shared_weights_across_stages",
                "create_partitions",
                "partition_traced_model",
                "stage_to_pipeline_parallel_rank",
            ),
            "NxDPPModel itself splits the model: give it pipeline_cuts, or auto_partition=True",
        )
    ),
    "neuronx_distributed.pipeline.scheduler": Module(
        device=dict.fromkeys(
            ("InferenceSchedule", "Train1F1BSchedule", "TrainInterleavedSchedule", "TrainSchedule"),
            "nxd_infer.pipeline.schedule.schedule() returns the passes of every rank",
        )
    ),
    "neuronx_distributed.pipeline.trace": Module(
        device=dict.fromkeys(
            ("HFTracerWrapper", "NxDTracer"), "give NxDPPModel no tracer_cls, or a torch.fx.Tracer of your own"
        )
    ),
    "neuronx_distributed.quantization.quantization_layers": Module(
        differs=dict.fromkeys(
            (
                "QuantizedColumnParallel",
                "QuantizedExpertFusedColumnParallel",
                "QuantizedExpertFusedRowParallel",
                "QuantizedRowParallel",
            ),
            "takes all but the sizes by keyword",
        )
    ),
    "neuronx_distributed.scripts.checkpoint_converter": Module("nxd_infer.checkpoint.neuronx.converter"),
    "neuronx_distributed.trace": Module(
        names={
            "BaseModelInstance": f"{_BUILDER}.first_generation",
            "ModelBuilder": f"{_BUILDER}.first_generation",
            "NxDModel": f"{_BUILDER}.nxd_model",
            "NxDParallelState": f"{_BUILDER}.parallel_context",
            "get_sharded_checkpoint": f"{_BUILDER}.shards",
            "init_on_device": f"{_BUILDER}.parallel_context",
            "shard_checkpoint": f"{_BUILDER}.shards",
        },
        differs={"ModelBuilder": _FIRST_BUILDER, "NxDModel": _NXD_MODEL},
    ),
    "neuronx_distributed.trace.functions": Module(f"{_BUILDER}.functions"),
    "neuronx_distributed.trace.mock_torchdist": Module(f"{_BUILDER}.parallel_context"),
    "neuronx_distributed.trace.model_builder": Module(
        f"{_BUILDER}.first_generation", differs={"ModelBuilder": _FIRST_BUILDER}
    ),
    "neuronx_distributed.trace.model_builder_utils": Module(f"{_BUILDER}.functions"),
    "neuronx_distributed.trace.model_builder_v2": Module(f"{_BUILDER}.functions"),
    "neuronx_distributed.trace.nxd_model": Module(f"{_BUILDER}.nxd_model", differs={"NxDModel": _NXD_MODEL}),
    "neuronx_distributed.trace.nxd_model.nxd_model": Module(f"{_BUILDER}.nxd_model", differs={"NxDModel": _NXD_MODEL}),
    "neuronx_distributed.trace.parallel_context": Module(f"{_BUILDER}.parallel_context"),
    "neuronx_distributed.trace.trace": Module(
        "nxd_infer.trace.api",
        {
            "get_sharded_checkpoint": f"{_BUILDER}.shards",
            "init_on_device": f"{_BUILDER}.parallel_context",
            "invoke_preshard_hook": f"{_BUILDER}.shards",
            "replace_weights": f"{_BUILDER}.nxd_model",
        },
    ),
    "neuronx_distributed.trainer.checkpoint": Module(
        "nxd_infer.checkpoint.api", {"finalize_checkpoint": "nxd_infer.checkpoint.api:wait_for_save"}
    ),
    "neuronx_distributed.trainer.hooks": Module(
        device=dict.fromkeys(
            ("register_all_hooks", "register_post_partition_hook"),
            "call the function after initialize_parallel_model(), which has split the model",
        )
    ),
    "neuronx_distributed.trainer.model": Module("nxd_infer.modules.nxd_model"),
    "neuronx_distributed.utils": Module(names={"cpu_mode": _UTILITIES}),
    "neuronx_distributed.utils.activation_checkpoint": Module(
        names={"apply_activation_checkpointing": "nxd_infer.trainer.activation_checkpoint:apply_activation_checkpoint"}
    ),
    "neuronx_distributed.utils.adamw_fp32_optim_params": Module("nxd_infer.optimizer.adamw_fp32"),
    "neuronx_distributed.utils.batch_utils": Module(names={"get_batch_on_this_context_parallel_rank": _UTILITIES}),
    "neuronx_distributed.utils.logger": Module(names={"get_logger": _UTILITIES}),
    "neuronx_distributed.utils.medusa_utils": Module(
        "nxd_infer.compat.medusa",
        device={"update_inference_inputs": "append candidates[best_candidate, : accept_length + 1] to the ids"},
    ),
    "neuronx_distributed.utils.model_utils": Module(
        names={
            "LogicalNCConfig": _UTILITIES,
            "get_platform_lnc": _UTILITIES,
            "init_on_device": f"{_BUILDER}.parallel_context",
            "is_hf_transformers_available": _UTILITIES,
            "move_model_to_device": "nxd_infer.layout.params",
        }
    ),
    "neuronx_distributed.utils.random": Module(names={"set_random_seed": _UTILITIES}),
    "neuronx_distributed.utils.sampling": Module(names={"Sampler": "nxd_infer.compat.sampling"}),
    "neuronx_distributed.utils.speculative_decoding": Module(
        device={"NeuronSpeculation": "`nxd-infer trace` and `serve` speculate, or transformers' generate()"}
    ),
    "neuronx_distributed.utils.tensor_capture": Module("nxd_infer.modules.tensor_capture"),
    "neuronx_distributed.utils.tensor_capture.model_modification": Module(
        names={"find_available_modules": "nxd_infer.modules.tensor_capture:get_available_modules"}
    ),
    "neuronx_distributed.utils.tensor_replacement": Module("nxd_infer.modules.tensor_replacement"),
    "neuronx_distributed.utils.tensor_replacement.registry": Module(
        "nxd_infer.modules.tensor_replacement",
        differs={"TensorReplacementRegister": "is given the model, and the tensors by the names of its modules"},
    ),
    "neuronx_distributed.utils.tensor_utils": Module(names={"cumsum": _UTILITIES}),
    "neuronx_distributed.utils.utils": Module(names={"hardware": _UTILITIES}),
    "neuronxcc.nki": Module(names={"jit": "nxd_infer.compat.torch_neuronx:nki_jit"}),
    "neuronxcc.nki._private_kernels.attention": Module(device={"attention_isa_kernel": _KERNEL}),
    "neuronxcc.nki.kernels.attention": Module(
        device=dict.fromkeys(("attention_isa_kernel", "flash_attn_bwd", "flash_fwd"), _KERNEL)
    ),
    "neuronxcc.nki.language": Module(device={"nc": _PLAIN}),
    "optimum.neuron.distributed": Module("nxd_infer.distributed"),
    "torch_neuronx": Module(device=dict.fromkeys(("nki_op", "wrap_nki"), _PLAIN)),
    "torch_neuronx.utils": Module(names={"get_platform_target": _UTILITIES}),
    "torch_neuronx.xla_impl.ops": Module(
        names=dict.fromkeys(("RmsNorm", "neuron_layer", "nki_jit"), "nxd_infer.compat.torch_neuronx"),
        device={"xla_hlo_call": _PLAIN},
    ),
    "torch_xla": Module("nxd_infer.compat.torch_xla"),
    "torch_xla._internal.tpu": Module("nxd_infer.compat.torch_xla.tpu"),
    "torch_xla.amp": Module(names={"GradScaler": "torch.amp", "autocast": "nxd_infer.compat.torch_xla.utils"}),
    "torch_xla.amp.syncfree": Module(names={"Adam": "torch.optim", "AdamW": "torch.optim", "SGD": "torch.optim"}),
    "torch_xla.core.xla_model": Module(
        "nxd_infer.compat.torch_xla.xla_model",
        device={"get_stablehlo": "torch.export.export()", "get_stablehlo_bytecode": "torch.export.export()"},
    ),
    "torch_xla.debug.metrics": Module("nxd_infer.compat.torch_xla.metrics"),
    "torch_xla.debug.profiler": Module(
        names={"StepTrace": "torch.profiler:record_function", "Trace": "torch.profiler:record_function"},
        device={"start_server": "torch.profiler.profile()", "trace": "torch.profiler.profile()"},
    ),
    "torch_xla.distributed.parallel_loader": Module("nxd_infer.compat.torch_xla.parallel_loader"),
    "torch_xla.distributed.xla_backend": Module("nxd_infer.compat.torch_xla.host"),
    "torch_xla.distributed.xla_multiprocessing": Module("nxd_infer.compat.torch_xla.spawning"),
    "torch_xla.experimental.tpu": Module("nxd_infer.compat.torch_xla.tpu"),
    "torch_xla.runtime": Module("nxd_infer.compat.torch_xla.runtime"),
    "torch_xla.utils.checkpoint": Module(names={"checkpoint": "torch.utils.checkpoint"}),
    "torch_xla.utils.utils": Module("nxd_infer.compat.torch_xla.utils"),
}
