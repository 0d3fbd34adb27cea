"""The call forms of the five documents this package implements, each run as printed, as ``neuronx_distributed``.

This module holds every documented signature; the printed calls themselves run in the modules beside it, at degree 1
without a process group and on two ranks. The documents, and where their calls are:

* the training API: :mod:`test_training`, :mod:`test_lora`, :mod:`test_layers` (checkpoints, norms, the QKV module)
* the guide of the model and optimizer wrapper: :mod:`test_training`, :mod:`test_pipeline`
* the API reference: this module (parallel state), :mod:`test_layers`, :mod:`test_padding`, :mod:`test_training`,
  :mod:`test_tracing`
* Lightning, in the training API and in the API reference: :mod:`test_lightning`
* Optimum Neuron Distributed: this module (signatures), and the tests of ``nxd_infer.distributed``. The overview of NxD
  Training prints no call; its YAML files are the recipes.

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

Not here yet, in words of the documents:

* Neuron devices. What is for their compiler is checked and ignored.
"""

from __future__ import annotations

import importlib
import inspect
import operator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import init

from nxd_infer import compat, distributed

compat.install()

import neuronx_distributed as nxd
from neuronx_distributed.parallel_layers import parallel_state

from tests.support.ranks import run_ranks
from tests.support.seeds.degrees import alone

EMPTY = inspect.Parameter.empty
TRAINER = "neuronx_distributed.trainer"
LAYERS = "neuronx_distributed.parallel_layers"

# Path, and the parameters in the documents' order with their defaults.
DOCUMENTED: dict[str, dict[str, object]] = {
    "neuronx_distributed.parallel_state.initialize_model_parallel": {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    },
    "neuronx_distributed.parallel_state.get_data_parallel_group": {"as_list": False},
    "neuronx_distributed.parallel_state.get_tensor_model_parallel_group": {"as_list": False},
    "neuronx_distributed.parallel_state.get_pipeline_model_parallel_group": {"as_list": False},
    "neuronx_distributed.parallel_state.move_model_to_device": {"model": EMPTY, "device": EMPTY},
    f"{LAYERS}.ParallelEmbedding": {
        "num_embeddings": EMPTY,
        "embedding_dim": EMPTY,
        "init_method": init.normal_,
        "dtype": torch.float32,
        "device": None,
    },
    f"{LAYERS}.ColumnParallelLinear": {
        "input_size": EMPTY,
        "output_size": EMPTY,
        "bias": True,
        "gather_output": True,
        "sequence_parallel_enabled": False,
        "dtype": torch.float32,
        "device": None,
    },
    f"{LAYERS}.RowParallelLinear": {
        "input_size": EMPTY,
        "output_size": EMPTY,
        "bias": True,
        "input_is_parallel": False,
        "sequence_parallel_enabled": False,
        "dtype": torch.float32,
        "device": None,
    },
    f"{LAYERS}.pad.pad_model": {
        "model": EMPTY,
        "tp_degree": EMPTY,
        "n_heads": EMPTY,
        "wrapped_classes": (),
        "pad_hook_fn": None,
    },
    f"{LAYERS}.loss_functions.parallel_cross_entropy": {
        "parallel_logits": EMPTY,
        "labels": EMPTY,
        "label_smoothing": 0.0,
    },
    f"{LAYERS}.save": {
        "state_dict": EMPTY,
        "save_dir": EMPTY,
        "save_serially": True,
        "save_xser": False,
        "down_cast_bf16": False,
    },
    f"{LAYERS}.load": {
        "load_dir": EMPTY,
        "model_or_optimizer": None,
        "model_key": "model",
        "load_xser": False,
        "sharded": True,
    },
    f"{LAYERS}.clip_grad_norm": {"parameters": EMPTY, "max_norm": EMPTY, "norm_type": 2},
    "neuronx_distributed.modules.qkv_linear.GQAQKVColumnParallelLinear": {
        "input_size": EMPTY,
        "output_size": None,
        "bias": True,
        "gather_output": True,
        "sequence_parallel_enabled": False,
        "dtype": torch.float32,
        "device": None,
        "kv_size_multiplier": 1,
        "fuse_qkv": True,
    },
    "neuronx_distributed.optimizer.NeuronZero1Optimizer.save_sharded_state_dict": {
        "self": EMPTY,
        "output_dir": EMPTY,
        "save_serially": True,
    },
    "neuronx_distributed.optimizer.NeuronZero1Optimizer.load_sharded_state_dict": {
        "self": EMPTY,
        "output_dir": EMPTY,
        "num_workers_per_step": 8,
    },
    "neuronx_distributed.pipeline.NxDPPModel": {
        "module": EMPTY,
        "transformer_layer_cls": None,
        "num_microbatches": 1,
        "output_loss_value_spec": None,
        "return_mb_loss": False,
        "broadcast_and_average_loss": False,
        "pipeline_cuts": None,
        "input_names": None,
        "leaf_module_cls": None,
        "autowrap_functions": None,
        "autowrap_modules": None,
        "tracer_cls": None,
        "param_init_fn": None,
        "trace_file_path": None,
        "use_zero1_optimizer": False,
        "auto_partition": False,
    },
    "neuronx_distributed.pipeline.NxDPPModel.run_train": {"self": EMPTY},
    "neuronx_distributed.pipeline.NxDPPModel.run_eval": {"self": EMPTY},
    "neuronx_distributed.pipeline.NxDPPModel.local_named_parameters": {"self": EMPTY},
    "neuronx_distributed.pipeline.NxDPPModel.local_named_modules": {"self": EMPTY},
    f"{TRAINER}.neuronx_distributed_config": {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "pipeline_config": None,
        "optimizer_config": None,
        "activation_checkpoint_config": None,
        "pad_model": False,
        "sequence_parallel": False,
        "model_init_config": None,
        "lora_config": None,
    },
    f"{TRAINER}.initialize_parallel_model": {"nxd_config": EMPTY, "model_fn": EMPTY},
    f"{TRAINER}.initialize_parallel_optimizer": {"nxd_config": EMPTY, "optimizer_class": EMPTY, "parameters": EMPTY},
    f"{TRAINER}.save_checkpoint": {
        "path": EMPTY,
        "tag": "",
        "model": None,
        "optimizer": None,
        "scheduler": None,
        "user_content": None,
        "num_workers": 8,
        "use_xser": False,
        "num_kept_ckpts": None,
        "async_save": False,
        "zero1_optimizer": False,
    },
    f"{TRAINER}.load_checkpoint": {
        "path": EMPTY,
        "tag": None,
        "model": None,
        "optimizer": None,
        "scheduler": None,
        "num_workers": 8,
        "strict": True,
    },
    f"{TRAINER}.model.NxDModel.local_module": {"self": EMPTY},
    f"{TRAINER}.model.NxDModel.run_train": {"self": EMPTY},
    "neuronx_distributed.trace.parallel_model_trace": {
        "func": EMPTY,
        "example_inputs": EMPTY,
        "compiler_workdir": None,
        "compiler_args": None,
        "inline_weights_to_neff": True,
        "bucket_config": None,
        "tp_degree": 1,
        "max_parallel_compilations": None,
    },
    "neuronx_distributed.trace.parallel_model_save": {"model": EMPTY, "save_dir": EMPTY},
    "neuronx_distributed.trace.parallel_model_load": {"load_dir": EMPTY},
}
OPTIMUM: dict[str, dict[str, object]] = {
    "Parallelizer._parallelize": {
        "model": EMPTY,
        "device": None,
        "parallelize_embeddings": True,
        "sequence_parallel_enabled": False,
        "should_parallelize_layer_predicate_func": None,
    },
    "Parallelizer.parallelize": {
        "model": EMPTY,
        "device": None,
        "parallelize_embeddings": True,
        "sequence_parallel_enabled": False,
        "kv_size_multiplier": None,
        "pipeline_parallel_input_names": None,
        "pipeline_parallel_num_microbatches": 1,
        "pipeline_parallel_use_zero1_optimizer": False,
        "pipeline_parallel_gradient_checkpointing_enabled": False,
        "checkpoint_dir": None,
        "num_local_ranks_per_step": 8,
    },
    "Parallelizer.optimizer_for_mp": {"optimizer": EMPTY, "orig_param_to_parallel_param_on_xla": EMPTY},
    "Parallelizer.save_model_sharded_checkpoint": {
        "model": EMPTY,
        "output_dir": EMPTY,
        "optimizer": None,
        "use_xser": True,
        "async_save": False,
        "num_local_ranks_per_step": 8,
    },
    "Parallelizer.load_model_sharded_checkpoint": {"model": EMPTY, "load_dir": EMPTY},
    "ParallelizersManager.get_supported_model_types": {},
    "ParallelizersManager.is_model_supported": {"model_type_or_model": EMPTY},
    "ParallelizersManager.parallelizer_for_model": {"model_type_or_model": EMPTY},
    "lazy_load_for_parallelism": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
    "make_optimizer_constructor_lazy": {"optimizer_cls": EMPTY},
}
"""Of ``optimum.neuron.distributed``, which is ``nxd_infer.distributed`` here."""
CALLED_DIRECTLY = (
    "neuronx_distributed_config",
    "initialize_parallel_model",
    "initialize_parallel_optimizer",
    "save_checkpoint",
    "load_checkpoint",
)
"""Of ``trainer``: the samples call them ``nxd.…``."""


def documented(path: str) -> Any:
    """What stands at a path: a module as far as there is one, and names in it."""
    found: Any = nxd
    for end, name in enumerate(path.split(".")[1:], start=2):
        if isinstance(found, ModuleType) and not hasattr(found, name):
            importlib.import_module(".".join(path.split(".")[:end]))
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("path", DOCUMENTED)
def test_signatures(path: str):
    """The documented parameters come first, in the documented order, with the documented defaults."""
    assert by_place(documented(path)) == list(DOCUMENTED[path].items())


def by_place(call: Any) -> list[tuple[str, object]]:
    parameters = inspect.signature(call).parameters.values()
    return [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


@pytest.mark.parametrize("path", OPTIMUM)
def test_signatures_of_optimum_neuron(path: str):
    """Its methods are called on the class, as ``ParallelizersManager.parallelizer_for_model`` gives it."""
    found = operator.attrgetter(path)(distributed)
    assert by_place(found) == list(OPTIMUM[path].items())
    others = [p.kind for p in inspect.signature(found).parameters.values() if p.kind is not p.POSITIONAL_OR_KEYWORD]
    assert others == ([inspect.Parameter.VAR_KEYWORD] if path.endswith("._parallelize") else [])
    if path.startswith("Parallelizer."):
        manager = distributed.ParallelizersManager
        for kind in manager.get_supported_model_types():
            assert by_place(getattr(manager.parallelizer_for_model(kind), found.__name__)) == by_place(found)


def test_functions_of_the_trainer_are_names_of_the_package():
    assert all(getattr(nxd, name) is documented(f"{TRAINER}.{name}") for name in CALLED_DIRECTLY)


def test_module_paths():
    """The paths that the documents and ported code import from."""
    for path, names in {
        "parallel_layers": [
            "ParallelEmbedding",
            "ColumnParallelLinear",
            "RowParallelLinear",
            "initialize_model_parallel",
        ],
        "parallel_layers.layers": ["BaseParallelLayer", "SPMDRank", "OutputChannelParallelConv2d"],
        "parallel_layers.mappings": [
            "copy_to_tensor_model_parallel_region",
            "gather_from_sequence_parallel_region",
            "gather_from_tensor_model_parallel_region",
            "reduce_from_tensor_model_parallel_region",
            "reduce_scatter_to_sequence_parallel_region",
            "scatter_to_sequence_parallel_region",
            "scatter_to_tensor_model_parallel_region",
        ],
        "parallel_layers.grads": ["clip_grad_norm"],
        "parallel_layers.pad": ["pad_model", "get_number_of_extra_heads"],
        "parallel_layers.parallel_state": ["get_tensor_model_parallel_size", "initialize_model_parallel"],
        "parallel_layers.utils": ["divide", "split_tensor_along_last_dim"],
        "parallel_layers.random": ["model_parallel_xla_manual_seed", "get_xla_rng_tracker"],
        "parallel_layers.checkpointing": ["save", "load"],
        "modules.qkv_linear": ["GQAQKVColumnParallelLinear"],
        "modules.lora": ["LoraConfig", "LoraModel", "LoRAModel", "get_lora_model"],
        "optimizer": ["NeuronZero1Optimizer"],
        "pipeline": ["NxDPPModel"],
        "pipeline.model": ["NxDPPModel"],
        "parallel_state": ["move_model_to_device", "get_context_model_parallel_group"],
        "trace": ["parallel_model_trace", "parallel_model_save", "parallel_model_load"],
        "trace.trace": ["parallel_model_trace", "TensorParallelNeuronModel"],
        "trainer.model": ["NxDModel"],
        "trainer.optimizer": ["NxDOptimizer"],
        "trainer.checkpoint": ["save_checkpoint", "load_checkpoint"],
    }.items():
        module = importlib.import_module(f"neuronx_distributed.{path}")
        missing = [name for name in names if getattr(module, name, None) is None]
        assert not missing, f"{path}: {missing}"


# --- the chapter "Parallel Model State" ---------------------------------------------------------------------


def state_calls(tp: int) -> list[object]:
    """Every helper of the chapter. Groups of ``torch.distributed`` are there where it is initialised."""
    nxd.parallel_state.destroy_model_parallel()
    nxd.parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=1)
    sizes = [
        nxd.parallel_state.get_data_parallel_size(),
        nxd.parallel_state.get_tensor_model_parallel_size(),
        nxd.parallel_state.get_pipeline_model_parallel_size(),
    ]
    ranks = [
        nxd.parallel_state.get_data_parallel_rank(),
        nxd.parallel_state.get_tensor_model_parallel_rank(),
        nxd.parallel_state.get_pipeline_model_parallel_rank(),
    ]
    lists = [
        nxd.parallel_state.get_data_parallel_group(as_list=True),
        nxd.parallel_state.get_tensor_model_parallel_group(as_list=True),
        nxd.parallel_state.get_pipeline_model_parallel_group(as_list=True),
    ]
    if torch.distributed.is_initialized():
        for number, group in enumerate(
            (
                nxd.parallel_state.get_data_parallel_group(as_list=False),
                nxd.parallel_state.get_tensor_model_parallel_group(),
                nxd.parallel_state.get_pipeline_model_parallel_group(),
            )
        ):
            assert torch.distributed.get_world_size(group) == sizes[number]
    layer = nxd.parallel_layers.ColumnParallelLinear(2, 4)
    nxd.parallel_state.move_model_to_device(layer, "cpu")
    assert layer.weight.tensor_model_parallel
    assert parallel_state.get_tensor_model_parallel_size is nxd.parallel_state.get_tensor_model_parallel_size
    return [sizes, ranks, lists]


def test_parallel_state():
    one = [[0]]
    assert alone(state_calls, 1) == [[1, 1, 1], [0, 0, 0], [one, one, one]]
    both, each = [[0, 1]], [[0], [1]]
    for rank, found in enumerate(run_ranks(state_calls, 2, 2)):
        assert found == [[1, 2, 1], [0, rank, 0], [each, both, each]]
    for rank, found in enumerate(run_ranks(state_calls, 2, 1)):
        assert found == [[2, 1, 1], [rank, 0, 0], [both, each, each]]
