"""Every documented signature and module path, under the names of ``neuronx_distributed``.

Corrected, since it is no valid Python or names what is not there:

* Degrees of 8 and 32 are the test's; ``...`` is left out or filled in; ``(training loop):`` is a loop.
* ``neuronx_distributed_config`` in the wrapper guide: its dictionaries lost the keywords they belong to, and the
  degrees.
* ``nxd.initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, param_groups,, betas=...``: two commas, no closing
  parenthesis. After "To access the wrapped model:" and "access grad norm value" the calls are missing; they are
  ``model.local_module()`` and ``optimizer.grad_norm``.
* ``pad_model(model, tp_degree=32, desired_config.num_heads)``: a positional argument follows a keyword. It is
  ``n_heads=desired_config.num_heads`` (three times).
* ``my_hook`` of the ``pad_hook_fn`` sample: the call of ``pad_model`` is indented into the hook's body, and the hook
  multiplies ``model.split_size`` where it is given ``attention_to_pad``.
* ``device=False`` in the signature of ``RowParallelLinear`` means None.
* ``output_size`` in the signature of ``GQAQKVColumnParallelLinear`` is ``output_sizes`` in its list of parameters; both
  are accepted.
* ``scheduler_args: Dict of keyworded args`` means ``scheduler_kwargs``; ``class NeuronXLAPrecisionPlugin`` and
  ``class NeuronTQDMProgressBar`` are printed without a call.
* ``param_init_fn`` "should be provided when ``param_init_fn`` is True": when ``meta_device_init`` is.
"""

from __future__ import annotations

import importlib
import inspect
import operator
from types import ModuleType
from typing import Any

import pytest
import torch

from nxd_infer import compat, distributed

compat.install()

import neuronx_distributed as nxd

from tests.support.seeds.signatures import by_place, documented

# In the documents' order, with their defaults.
DOCUMENTED = documented("""
parallel_state.initialize_model_parallel(tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
parallel_state.get_data_parallel_group(as_list=False)
parallel_state.get_tensor_model_parallel_group(as_list=False)
parallel_state.get_pipeline_model_parallel_group(as_list=False)
parallel_state.move_model_to_device(model, device)
parallel_layers.ParallelEmbedding(num_embeddings, embedding_dim, init_method=normal_, dtype=torch.float32, device=None)
parallel_layers.ColumnParallelLinear(input_size, output_size, bias=True, gather_output=True,
    sequence_parallel_enabled=False, dtype=torch.float32, device=None)
parallel_layers.RowParallelLinear(input_size, output_size, bias=True, input_is_parallel=False,
    sequence_parallel_enabled=False, dtype=torch.float32, device=None)
parallel_layers.pad.pad_model(model, tp_degree, n_heads, wrapped_classes=(), pad_hook_fn=None)
parallel_layers.loss_functions.parallel_cross_entropy(parallel_logits, labels, label_smoothing=0.0)
parallel_layers.save(state_dict, save_dir, save_serially=True, save_xser=False, down_cast_bf16=False)
parallel_layers.load(load_dir, model_or_optimizer=None, model_key='model', load_xser=False, sharded=True)
parallel_layers.clip_grad_norm(parameters, max_norm, norm_type=2)
modules.qkv_linear.GQAQKVColumnParallelLinear(input_size, output_size=None, bias=True, gather_output=True,
    sequence_parallel_enabled=False, dtype=torch.float32, device=None, kv_size_multiplier=1, fuse_qkv=True)
optimizer.NeuronZero1Optimizer.save_sharded_state_dict(output_dir, save_serially=True)
optimizer.NeuronZero1Optimizer.load_sharded_state_dict(output_dir, num_workers_per_step=8)
pipeline.NxDPPModel(module, transformer_layer_cls=None, num_microbatches=1, output_loss_value_spec=None,
    return_mb_loss=False, broadcast_and_average_loss=False, pipeline_cuts=None, input_names=None, leaf_module_cls=None,
    autowrap_functions=None, autowrap_modules=None, tracer_cls=None, param_init_fn=None, trace_file_path=None,
    use_zero1_optimizer=False, auto_partition=False)
pipeline.NxDPPModel.run_train()
pipeline.NxDPPModel.run_eval()
pipeline.NxDPPModel.local_named_parameters()
pipeline.NxDPPModel.local_named_modules()
trainer.neuronx_distributed_config(tensor_parallel_size=1, pipeline_parallel_size=1, pipeline_config=None,
    optimizer_config=None, activation_checkpoint_config=None, pad_model=False, sequence_parallel=False,
    model_init_config=None, lora_config=None)
trainer.initialize_parallel_model(nxd_config, model_fn)
trainer.initialize_parallel_optimizer(nxd_config, optimizer_class, parameters)
trainer.save_checkpoint(path, tag='', model=None, optimizer=None, scheduler=None, user_content=None, num_workers=8,
    use_xser=False, num_kept_ckpts=None, async_save=False, zero1_optimizer=False)
trainer.load_checkpoint(path, tag=None, model=None, optimizer=None, scheduler=None, num_workers=8, strict=True)
trainer.model.NxDModel.local_module()
trainer.model.NxDModel.run_train()
trace.parallel_model_trace(func, example_inputs, compiler_workdir=None, compiler_args=None,
    inline_weights_to_neff=True, bucket_config=None, tp_degree=1, max_parallel_compilations=None)
trace.parallel_model_save(model, save_dir)
trace.parallel_model_load(load_dir)
""")
# Of ``optimum.neuron.distributed``, which is ``nxd_infer.distributed`` here.
OPTIMUM = documented("""
Parallelizer._parallelize(model, device=None, parallelize_embeddings=True, sequence_parallel_enabled=False,
    should_parallelize_layer_predicate_func=None)
Parallelizer.parallelize(model, device=None, parallelize_embeddings=True, sequence_parallel_enabled=False,
    kv_size_multiplier=None, pipeline_parallel_input_names=None, pipeline_parallel_num_microbatches=1,
    pipeline_parallel_use_zero1_optimizer=False, pipeline_parallel_gradient_checkpointing_enabled=False,
    checkpoint_dir=None, num_local_ranks_per_step=8)
Parallelizer.optimizer_for_mp(optimizer, orig_param_to_parallel_param_on_xla)
Parallelizer.save_model_sharded_checkpoint(model, output_dir, optimizer=None, use_xser=True, async_save=False,
    num_local_ranks_per_step=8)
Parallelizer.load_model_sharded_checkpoint(model, load_dir)
ParallelizersManager.get_supported_model_types()
ParallelizersManager.is_model_supported(model_type_or_model)
ParallelizersManager.parallelizer_for_model(model_type_or_model)
lazy_load_for_parallelism(tensor_parallel_size=1, pipeline_parallel_size=1)
make_optimizer_constructor_lazy(optimizer_cls)
""")
# The paths that the documents and ported code import from.
PATHS = """
parallel_layers: ParallelEmbedding ColumnParallelLinear RowParallelLinear initialize_model_parallel
parallel_layers.layers: BaseParallelLayer SPMDRank OutputChannelParallelConv2d
parallel_layers.mappings: copy_to_tensor_model_parallel_region gather_from_sequence_parallel_region
parallel_layers.mappings: gather_from_tensor_model_parallel_region reduce_from_tensor_model_parallel_region
parallel_layers.mappings: reduce_scatter_to_sequence_parallel_region scatter_to_sequence_parallel_region
parallel_layers.mappings: scatter_to_tensor_model_parallel_region
parallel_layers.grads: clip_grad_norm
parallel_layers.pad: pad_model get_number_of_extra_heads
parallel_layers.parallel_state: get_tensor_model_parallel_size initialize_model_parallel
parallel_layers.utils: divide split_tensor_along_last_dim
parallel_layers.random: model_parallel_xla_manual_seed get_xla_rng_tracker
parallel_layers.checkpointing: save load
modules.qkv_linear: GQAQKVColumnParallelLinear
modules.lora: LoraConfig LoraModel LoRAModel get_lora_model
optimizer: NeuronZero1Optimizer
pipeline: NxDPPModel
pipeline.model: NxDPPModel
parallel_state: move_model_to_device get_context_model_parallel_group
trace: parallel_model_trace parallel_model_save parallel_model_load
trace.trace: parallel_model_trace TensorParallelNeuronModel
trainer.model: NxDModel
trainer.optimizer: NxDOptimizer
trainer.checkpoint: save_checkpoint load_checkpoint
"""


def at(path: str) -> Any:
    """What stands at a path: a module as far as there is one, and names in it."""
    found: Any = nxd
    names = path.split(".")
    for end, name in enumerate(names, start=1):
        if isinstance(found, ModuleType) and not hasattr(found, name):
            importlib.import_module(".".join(["neuronx_distributed", *names[:end]]))
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("path", DOCUMENTED)
def test_signatures(path: str):
    """The documented parameters come first, in the documented order, with the documented defaults."""
    assert by_place(at(path)) == DOCUMENTED[path]
    name = path.removeprefix("trainer.")
    if name != path and "." not in name:  # the samples call it ``nxd.…``
        assert getattr(nxd, name) is at(path)


@pytest.mark.parametrize("path", OPTIMUM)
def test_signatures_of_optimum_neuron(path: str):
    """Its methods are called on the class, as ``ParallelizersManager.parallelizer_for_model`` gives it."""
    found = operator.attrgetter(path)(distributed)
    assert by_place(found) == OPTIMUM[path]
    others = [p.kind for p in inspect.signature(found).parameters.values() if p.kind is not p.POSITIONAL_OR_KEYWORD]
    assert others == ([inspect.Parameter.VAR_KEYWORD] if path.endswith("._parallelize") else [])
    if path.startswith("Parallelizer."):
        manager = distributed.ParallelizersManager
        for kind in manager.get_supported_model_types():
            assert by_place(getattr(manager.parallelizer_for_model(kind), found.__name__)) == by_place(found)


def test_the_qkv_module_takes_its_sizes_under_both_documented_names():
    for name in ("output_size", "output_sizes"):
        parts = at("modules.qkv_linear.GQAQKVColumnParallelLinear")(8, **{name: [16, 8]})(torch.ones(2, 8))
        assert [part.shape[-1] for part in parts] == [16, 8, 8]


def test_module_paths():
    for line in PATHS.strip().splitlines():
        path, _, names = line.partition(": ")
        module = importlib.import_module(f"neuronx_distributed.{path}")
        missing = [name for name in names.split() if getattr(module, name, None) is None]
        assert not missing, f"{path}: {missing}"
