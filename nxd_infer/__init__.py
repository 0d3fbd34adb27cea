"""Shard a PyTorch model, trace each rank ahead of time, save, load and serve it.

    import nxd_infer as nxd

    model = nxd.trace.parallel_model_trace(get_model, example_inputs, tp_degree=2)
    nxd.trace.parallel_model_save(model, "artifact")
    model = nxd.trace.parallel_model_load("artifact")
    outputs = model(*tensors)

    nxd_config = nxd.neuronx_distributed_config(tensor_parallel_size=2)
    model = nxd.initialize_parallel_model(nxd_config, get_model, config)
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, model.parameters(), lr=1e-3)
    loss = model.run_train(**batch)
    optimizer.step()

Submodules are imported on first use: ``import nxd_infer`` itself loads nothing, not even torch, so ``nxd-infer --help``
answers at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_infer.util.lazy import lazy_names
from nxd_infer.util.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from nxd_infer import (
        artifact,
        backends,
        checkpoint,
        distributed,
        errors,
        layout,
        modules,
        optimizer,
        parallel_layers,
        parallel_state,
        pipeline,
        runtime,
        testing,
        trace,
        trainer,
    )
    from nxd_infer.trainer import (
        initialize_parallel_model,
        initialize_parallel_optimizer,
        load_checkpoint,
        neuronx_distributed_config,
        save_checkpoint,
    )

__all__ = [
    "__version__", "artifact", "backends", "checkpoint", "distributed", "errors", "initialize_parallel_model",
    "initialize_parallel_optimizer", "layout", "load_checkpoint", "modules", "neuronx_distributed_config", "optimizer",
    "parallel_layers", "parallel_state", "pipeline", "runtime", "save_checkpoint", "testing", "trace", "trainer",
]  # fmt: skip

_TRAINER = (
    "initialize_parallel_model initialize_parallel_optimizer load_checkpoint neuronx_distributed_config save_checkpoint"
)
# Without lightning in a `*` import: it needs a package of its own.
_MODULES = {*__all__, "lightning"} - {"__version__", *_TRAINER.split()}
__getattr__, __dir__ = lazy_names(__name__, {".trainer": _TRAINER}, _MODULES)
