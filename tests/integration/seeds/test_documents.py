"""The call forms of the five documents this package implements, each run as printed, as ``neuronx_distributed``.

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

import torch

from nxd_infer import compat

compat.install()

import neuronx_distributed as nxd
from neuronx_distributed.parallel_layers import parallel_state

from tests.support.ranks import run_ranks
from tests.support.seeds.degrees import alone


def state_calls(tp: int) -> list[object]:
    """Every helper of the chapter "Parallel Model State"; it has groups where ``torch.distributed`` is initialised."""
    nxd.parallel_state.destroy_model_parallel()
    nxd.parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=1)
    found = []
    for axis in ("data", "tensor_model", "pipeline_model"):
        group = getattr(nxd.parallel_state, f"get_{axis}_parallel_group")
        size = getattr(nxd.parallel_state, f"get_{axis}_parallel_size")()
        if torch.distributed.is_initialized():
            assert torch.distributed.get_world_size(group(as_list=False)) == size
        found.append([size, getattr(nxd.parallel_state, f"get_{axis}_parallel_rank")(), group(as_list=True)])
    layer = nxd.parallel_layers.ColumnParallelLinear(2, 4)
    nxd.parallel_state.move_model_to_device(layer, "cpu")
    assert layer.weight.tensor_model_parallel
    assert parallel_state.get_tensor_model_parallel_size is nxd.parallel_state.get_tensor_model_parallel_size
    return found


def test_parallel_state():
    one, both, each = [[0]], [[0, 1]], [[0], [1]]
    assert alone(state_calls, 1) == [[1, 0, one]] * 3
    for rank, found in enumerate(run_ranks(state_calls, 2, 2)):
        assert found == [[1, 0, each], [2, rank, both], [1, 0, each]]
    for rank, found in enumerate(run_ranks(state_calls, 2, 1)):
        assert found == [[2, rank, both], [1, 0, each], [1, 0, each]]
