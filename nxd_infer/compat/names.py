"""The table of old names: where each name of neuronx_distributed and torch_neuronx is here.

A module that is not listed has the same path here, with all its names. Paths that begin with a dot are below
neuronx_distributed. ``nxd-infer port`` and docs/migration.md read the same table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

ROOTS: dict[str, str | None] = {
    "neuronx_distributed": "nxd_infer",
    "neuronxcc": None,
    "optimum.neuron": None,
    "torch_neuronx": "nxd_infer.compat.torch_neuronx",
    "torch_xla": None,
}
"""Packages whose names are answered, and ours that has the same paths below it (None: what is listed, no more)."""

_BUILDER, _UTILITIES, _XLA = (f"nxd_infer.compat.{name}" for name in ("model_builder", "utilities", "torch_xla"))

_MODULES = {
    "nxd_infer.checkpoint.api": ".trainer.checkpoint",
    "nxd_infer.checkpoint.neuronx.converter": ".scripts.checkpoint_converter",
    "nxd_infer.compat.attention": ".modules.attention.utils",
    "nxd_infer.compat.medusa": ".utils.medusa_utils",
    f"{_BUILDER}.first_generation": ".trace.model_builder",
    f"{_BUILDER}.functions": ".trace.functions .trace.model_builder_utils .trace.model_builder_v2",
    f"{_BUILDER}.nxd_model": ".trace.nxd_model .trace.nxd_model.nxd_model",
    f"{_BUILDER}.parallel_context": ".trace.mock_torchdist .trace.parallel_context",
    _XLA: "torch_xla",
    f"{_XLA}.host": "torch_xla.distributed.xla_backend",
    f"{_XLA}.metrics": "torch_xla.debug.metrics",
    f"{_XLA}.parallel_loader": "torch_xla.distributed.parallel_loader",
    f"{_XLA}.runtime": "torch_xla.runtime",
    f"{_XLA}.serialization": "torch_xla.utils.serialization",
    f"{_XLA}.spawning": "torch_xla.distributed.xla_multiprocessing",
    f"{_XLA}.tpu": "torch_xla._internal.tpu torch_xla.experimental.tpu",
    f"{_XLA}.xla_model": "torch_xla.core.xla_model",
    "nxd_infer.distributed": "optimum.neuron.distributed",
    "nxd_infer.modules.lora.layers": ".modules.lora.layer",
    "nxd_infer.modules.moe.expert_mlps_v2": ".modules.moe.expert_mlps",
    "nxd_infer.modules.nxd_model": ".trainer.model",
    "nxd_infer.modules.tensor_capture": ".utils.tensor_capture",
    "nxd_infer.optimizer.adamw_fp32": ".utils.adamw_fp32_optim_params",
    "nxd_infer.parallel_state": ".parallel_layers.parallel_state",
    "nxd_infer.trace.api": ".trace.trace",
}
"""Modules here, and the old ones whose names they have, all or most."""

_NAMES = (
    (".", "ModelBuilder", f"{_BUILDER}.functions"),
    (".", "NxDModel", f"{_BUILDER}.nxd_model"),
    (".", "NxDParallelState", f"{_BUILDER}.parallel_context"),
    (".", "shard_checkpoint", f"{_BUILDER}.shards"),
    (".kernels.flash_attn", "nki_flash_attn_func", "nxd_infer.compat.attention"),
    (".kernels.ring_attention_kernel", "nki_ring_attn_func", "nxd_infer.compat.attention"),
    (".modules.moe.model_utils", "ACT2FN", "nxd_infer.modules.activations:ACTIVATIONS"),
    (".modules.moe.model_utils", "GLUType", "nxd_infer.modules.moe.moe_configs"),
    (".operators.argmax", "argmax", "nxd_infer.parallel_layers.search"),
    (".operators.topk", "topk", "nxd_infer.parallel_layers.search"),
    (".optimizer", "NeuronEPZero1Optimizer", "nxd_infer.optimizer:NeuronZero1Optimizer"),
    (".parallel_layers.checkpointing", "NXD_SKIP_RENDEZVOUS", _UTILITIES),
    (".parallel_layers.checkpointing", "_invoke_preshard_hook", f"{_BUILDER}.shards:invoke_preshard_hook"),
    (".parallel_layers.comm", "all_gather all_reduce reduce_scatter", f"{_XLA}.xla_model"),
    (".parallel_layers.parallel_state", "get_gloo_group rmsg", _UTILITIES),
    (
        ".parallel_layers.random",
        "_MODEL_PARALLEL_RNG_TRACKER_NAME",
        "nxd_infer.parallel_layers.random:MODEL_PARALLEL_RNG",
    ),
    (".parallel_layers.utils", "is_pjrt_device is_torch_version_greater_than_2 requires_init_pg_override", _UTILITIES),
    (".pipeline.comm", "rmsg", _UTILITIES),
    (".trace", "BaseModelInstance ModelBuilder", f"{_BUILDER}.first_generation"),
    (".trace", "NxDModel", f"{_BUILDER}.nxd_model"),
    (".trace", "NxDParallelState init_on_device", f"{_BUILDER}.parallel_context"),
    (".trace", "get_sharded_checkpoint shard_checkpoint", f"{_BUILDER}.shards"),
    (".trace.trace", "get_sharded_checkpoint invoke_preshard_hook", f"{_BUILDER}.shards"),
    (".trace.trace", "init_on_device", f"{_BUILDER}.parallel_context"),
    (".trace.trace", "replace_weights", f"{_BUILDER}.nxd_model"),
    (".trainer.checkpoint", "finalize_checkpoint", "nxd_infer.checkpoint.api:wait_for_save"),
    (".utils", "cpu_mode", _UTILITIES),
    (
        ".utils.activation_checkpoint",
        "apply_activation_checkpointing",
        "nxd_infer.trainer.activation_checkpoint:apply_activation_checkpoint",
    ),
    (".utils.batch_utils", "get_batch_on_this_context_parallel_rank", _UTILITIES),
    (".utils.logger", "get_logger", _UTILITIES),
    (".utils.model_utils", "LogicalNCConfig get_platform_lnc is_hf_transformers_available", _UTILITIES),
    (".utils.model_utils", "init_on_device", f"{_BUILDER}.parallel_context"),
    (".utils.model_utils", "move_model_to_device", "nxd_infer.layout.params"),
    (".utils.random", "set_random_seed", _UTILITIES),
    (".utils.sampling", "Sampler", "nxd_infer.compat.sampling"),
    (
        ".utils.tensor_capture.model_modification",
        "find_available_modules",
        "nxd_infer.modules.tensor_capture:get_available_modules",
    ),
    (".utils.tensor_replacement", "TensorReplacementRegister", "nxd_infer.modules.tensor_capture"),
    (".utils.tensor_replacement.registry", "TensorReplacementRegister", "nxd_infer.modules.tensor_capture"),
    (".utils.tensor_utils", "cumsum", _UTILITIES),
    (".utils.utils", "hardware", _UTILITIES),
    ("neuronxcc.nki", "jit", "nxd_infer.compat.torch_neuronx:nki_jit"),
    ("torch_neuronx.utils", "get_platform_target", _UTILITIES),
    ("torch_neuronx.xla_impl.ops", "RmsNorm neuron_layer nki_jit", "nxd_infer.compat.torch_neuronx"),
    ("torch_xla.amp", "GradScaler", "torch.amp"),
    ("torch_xla.amp", "autocast", f"{_XLA}.host"),
    ("torch_xla.amp.syncfree", "Adam AdamW SGD", "torch.optim"),
    ("torch_xla.debug.profiler", "StepTrace Trace", "torch.profiler:record_function"),
    ("torch_xla.utils.checkpoint", "checkpoint", "torch.utils.checkpoint"),
)
"""Old modules, names of theirs, and where these are: a module, or ``"module:attribute"``."""

_DEVICE = """
ExpertMLPs itself computes dropless experts
    .modules.moe.blockwise BlockwiseMatmulNKIFunc TorchBlockwiseTraining can_use_blockwise_matmul_nki
leave it out: MoE itself decodes
    .modules.moe.moe_configs MoEFusedTKGConfig
initialize_model_parallel(expert_model_parallel_size=) makes the groups, one set for prompts and decoding
    .modules.moe.moe_process_group get_moe_ep_group get_moe_tp_ep_group init_tensor_expert_parallel_moe_process_groups
GQAQKVColumnParallelLinear replicates key and value heads itself
    .modules.qkv_linear get_kv_shared_group
    .parallel_layers.parallel_state get_kv_shared_group get_kv_shared_group_size
    .parallel_layers.parallel_state get_kv_shared_replica_groups initialize_kv_group
torch.distributed has them
    .pipeline.comm recv_from recv_python_object send send_python_object
NxDPPModel itself splits the model: give it pipeline_cuts, or auto_partition=True
    .pipeline.partition analyze_pipeline_module analyze_shared_weights_across_stages create_partitions
    .pipeline.partition partition_traced_model stage_to_pipeline_parallel_rank
nxd_infer.pipeline.schedule.schedule() returns the passes of every rank
    .pipeline.scheduler InferenceSchedule Train1F1BSchedule TrainInterleavedSchedule TrainSchedule
give NxDPPModel no tracer_cls, or a torch.fx.Tracer of your own
    .pipeline.trace HFTracerWrapper NxDTracer
call the function after initialize_parallel_model(), which has split the model
    .trainer.hooks register_all_hooks register_post_partition_hook
append candidates[best_candidate, : accept_length + 1] to the ids
    .utils.medusa_utils update_inference_inputs
`nxd-infer trace` and `serve` speculate, or transformers' generate()
    .utils.speculative_decoding NeuronSpeculation
call nki_flash_attn_func, or scaled_dot_product_attention
    neuronxcc.nki._private_kernels.attention attention_isa_kernel
    neuronxcc.nki.kernels.attention attention_isa_kernel flash_attn_bwd flash_fwd
write it in plain PyTorch, which a backend compiles
    neuronxcc.nki.language nc
    torch_neuronx nki_op wrap_nki
    torch_neuronx.xla_impl.ops xla_hlo_call
torch.export.export()
    torch_xla.core.xla_model get_stablehlo get_stablehlo_bytecode
torch.profiler.profile()
    torch_xla.debug.profiler start_server trace
"""
"""What to call instead of names that have no place here, most for a Neuron device only: modules, then their names."""

_DIFFERS = """
save() writes a directory; all ranks run on this host
    . NxDModel
    .trace NxDModel
    .trace.nxd_model NxDModel
    .trace.nxd_model.nxd_model NxDModel
is computed by PyTorch's scaled_dot_product_attention, on any device
    .kernels.flash_attn nki_flash_attn_func
gathers keys and values instead of passing them around the ring
    .kernels.ring_attention_kernel nki_ring_attn_func
settings of the blockwise kernel change nothing
    .modules.moe.expert_mlps ExpertMLPs
    .modules.moe.expert_mlps_v2 ExpertMLPsV2
takes all but the sizes by keyword
    .quantization.quantization_layers QuantizedColumnParallel QuantizedExpertFusedColumnParallel
    .quantization.quantization_layers QuantizedExpertFusedRowParallel QuantizedRowParallel
compiler arguments of all keys are joined; torch.jit.save(model, path) makes a directory
    .trace ModelBuilder
    .trace.model_builder ModelBuilder
is given the model, and the tensors by the names of its modules
    .utils.tensor_replacement.registry TensorReplacementRegister
"""
"""How names behave otherwise here."""


@dataclass
class Module:
    """One module of an old package."""

    ours: str | None = None
    """The module here whose names it has as well (default: the one of the same path, if there is one)."""
    names: dict[str, str] = field(default_factory=dict)
    """An old name and ``"nxd_infer.module:attribute"`` (``"nxd_infer.module"``: the attribute has the same name)."""
    device: dict[str, str] = field(default_factory=dict)
    """A name that has no place here, and what to call instead. Using it raises."""
    differs: dict[str, str] = field(default_factory=dict)
    """An old name, and how it behaves otherwise here."""


def _rows(table: str) -> Iterator[tuple[str, str, str]]:
    """Yield the modules and names that are indented below a text, and the text."""
    text = ""
    for line in table.strip().splitlines():
        if not line.startswith(" "):
            text = line
            continue
        module, _, names = line.strip().partition(" ")
        yield module, names, text


def _table() -> dict[str, Module]:
    found: dict[str, Module] = {}

    def module(path: str) -> Module:
        return found.setdefault(f"neuronx_distributed{path.rstrip('.')}" if path.startswith(".") else path, Module())

    for ours, paths in _MODULES.items():
        for path in paths.split():
            module(path).ours = ours
    for path, names, place in _NAMES:
        module(path).names |= dict.fromkeys(names.split(), place)
    for path, names, text in _rows(_DEVICE):
        module(path).device |= dict.fromkeys(names.split(), text)
    for path, names, text in _rows(_DIFFERS):
        module(path).differs |= dict.fromkeys(names.split(), text)
    return dict(sorted(found.items()))


OLD: dict[str, Module] = _table()
