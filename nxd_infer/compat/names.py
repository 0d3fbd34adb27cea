"""The table of old names: where each name of neuronx_distributed and torch_neuronx is here.

A module that is not listed has the same path here, with all its names. Paths that begin with a dot are below
neuronx_distributed, and ours below nxd_infer. ``nxd-infer port`` and docs/migration.md read the same table.
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

_MODULES = """
.checkpoint.api .trainer.checkpoint
.checkpoint.neuronx.converter .scripts.checkpoint_converter
.compat.attention .modules.attention.utils
.compat.medusa .utils.medusa_utils
.compat.model_builder.first_generation .trace.model_builder
.compat.model_builder.functions .trace.functions .trace.model_builder_utils .trace.model_builder_v2
.compat.model_builder.nxd_model .trace.nxd_model .trace.nxd_model.nxd_model
.compat.model_builder.parallel_context .trace.mock_torchdist .trace.parallel_context
.compat.torch_xla torch_xla
.compat.torch_xla.host torch_xla.distributed.xla_backend
.compat.torch_xla.metrics torch_xla.debug.metrics
.compat.torch_xla.parallel_loader torch_xla.distributed.parallel_loader
.compat.torch_xla.runtime torch_xla.runtime
.compat.torch_xla.serialization torch_xla.utils.serialization
.compat.torch_xla.spawning torch_xla.distributed.xla_multiprocessing
.compat.torch_xla.tpu torch_xla._internal.tpu torch_xla.experimental.tpu
.compat.torch_xla.xla_model torch_xla.core.xla_model
.distributed optimum.neuron.distributed
.modules.lora.layers .modules.lora.layer
.modules.moe.expert_mlps_v2 .modules.moe.expert_mlps
.modules.nxd_model .trainer.model
.modules.tensor_capture .utils.tensor_capture
.optimizer.adamw_fp32 .utils.adamw_fp32_optim_params
.parallel_state .parallel_layers.parallel_state
.trace.api .trace.trace
"""
"""Modules here, and the old ones whose names they have, all or most."""

_NAMES = """
. ModelBuilder .compat.model_builder.functions
. NxDModel .compat.model_builder.nxd_model
. NxDParallelState .compat.model_builder.parallel_context
. shard_checkpoint .compat.model_builder.shards
.kernels.flash_attn nki_flash_attn_func .compat.attention
.kernels.ring_attention_kernel nki_ring_attn_func .compat.attention
.modules.moe.model_utils ACT2FN .modules.activations:ACTIVATIONS
.modules.moe.model_utils GLUType .modules.moe.moe_configs
.operators.argmax argmax .parallel_layers.search
.operators.topk topk .parallel_layers.search
.optimizer NeuronEPZero1Optimizer .optimizer:NeuronZero1Optimizer
.parallel_layers.checkpointing NXD_SKIP_RENDEZVOUS .compat.utilities
.parallel_layers.checkpointing _invoke_preshard_hook .compat.model_builder.shards:invoke_preshard_hook
.parallel_layers.comm all_gather all_reduce reduce_scatter .compat.torch_xla.xla_model
.parallel_layers.parallel_state get_gloo_group rmsg .compat.utilities
.parallel_layers.random _MODEL_PARALLEL_RNG_TRACKER_NAME .parallel_layers.random:MODEL_PARALLEL_RNG
.parallel_layers.utils is_pjrt_device is_torch_version_greater_than_2 requires_init_pg_override .compat.utilities
.pipeline.comm rmsg .compat.utilities
.trace BaseModelInstance ModelBuilder .compat.model_builder.first_generation
.trace NxDModel .compat.model_builder.nxd_model
.trace NxDParallelState init_on_device .compat.model_builder.parallel_context
.trace get_sharded_checkpoint shard_checkpoint .compat.model_builder.shards
.trace.trace get_sharded_checkpoint invoke_preshard_hook .compat.model_builder.shards
.trace.trace init_on_device .compat.model_builder.parallel_context
.trace.trace replace_weights .compat.model_builder.nxd_model
.trainer.checkpoint finalize_checkpoint .checkpoint.api:wait_for_save
.utils cpu_mode .compat.utilities
.utils.activation_checkpoint apply_activation_checkpointing .trainer.activation_checkpoint:apply_activation_checkpoint
.utils.batch_utils get_batch_on_this_context_parallel_rank .compat.utilities
.utils.logger get_logger .compat.utilities
.utils.model_utils LogicalNCConfig get_platform_lnc is_hf_transformers_available .compat.utilities
.utils.model_utils init_on_device .compat.model_builder.parallel_context
.utils.model_utils move_model_to_device .layout.params
.utils.random set_random_seed .compat.utilities
.utils.sampling Sampler .compat.sampling
.utils.tensor_capture.model_modification find_available_modules .modules.tensor_capture:get_available_modules
.utils.tensor_replacement TensorReplacementRegister .modules.tensor_capture
.utils.tensor_replacement.registry TensorReplacementRegister .modules.tensor_capture
.utils.tensor_utils cumsum .compat.utilities
.utils.utils hardware .compat.utilities
neuronxcc.nki jit .compat.torch_neuronx:nki_jit
torch_neuronx.utils get_platform_target .compat.utilities
torch_neuronx.xla_impl.ops RmsNorm neuron_layer nki_jit .compat.torch_neuronx
torch_xla.amp GradScaler torch.amp
torch_xla.amp autocast .compat.torch_xla.host
torch_xla.amp.syncfree Adam AdamW SGD torch.optim
torch_xla.debug.profiler StepTrace Trace torch.profiler:record_function
torch_xla.utils.checkpoint checkpoint torch.utils.checkpoint
"""
"""Old modules, names of theirs, and where these are: a module, or ``module:attribute``."""

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


def _words(table: str) -> list[list[str]]:
    return [line.split() for line in table.strip().splitlines()]


def _ours(path: str) -> str:
    return f"nxd_infer{path}" if path.startswith(".") else path


def _table() -> dict[str, Module]:
    found: dict[str, Module] = {}

    def module(path: str) -> Module:
        return found.setdefault(f"neuronx_distributed{path.rstrip('.')}" if path.startswith(".") else path, Module())

    for ours, *paths in _words(_MODULES):
        for path in paths:
            module(path).ours = _ours(ours)
    for path, *names, place in _words(_NAMES):
        module(path).names |= dict.fromkeys(names, _ours(place))
    for path, names, text in _rows(_DEVICE):
        module(path).device |= dict.fromkeys(names.split(), text)
    for path, names, text in _rows(_DIFFERS):
        module(path).differs |= dict.fromkeys(names.split(), text)
    return dict(sorted(found.items()))


OLD: dict[str, Module] = _table()
