"""Training with PyTorch Lightning (``pip install 'nxd-infer[lightning]'``).

::

    nxd_config = nxd.neuronx_distributed_config(tensor_parallel_size=2)
    module = NeuronLTModule(get_model, nxd_config, torch.optim.AdamW, None, opt_kwargs={"lr": 1e-3})
    trainer = Trainer(
        strategy=NeuronXLAStrategy(nxd_config),
        plugins=[NeuronXLAPrecisionPlugin()],
        callbacks=[NeuronTQDMProgressBar()],
        logger=NeuronTensorBoardLogger("logs"),
        devices=2,
    )
    trainer.fit(module, dataloader)

Source: NxD Core training API, "Neuron PyTorch-Lightning". Lightning itself does the rest: its other callbacks, loggers
and profilers work as with any strategy.
"""

from importlib.machinery import PathFinder

from nxd_infer.errors import MissingPackageError

try:
    import lightning.pytorch  # noqa: F401
    from lightning.fabric.accelerators import xla
except ModuleNotFoundError as error:
    raise MissingPackageError(
        "nxd_infer.lightning needs the package lightning: pip install 'nxd-infer[lightning]'", name=error.name
    ) from error

if PathFinder.find_spec("torch_xla") is None:
    xla._XLA_AVAILABLE.available = False  # not even where a script has compat's

from nxd_infer.lightning.module import NeuronLTModule
from nxd_infer.lightning.outputs import (
    NeuronHooksCallback,
    NeuronTensorBoardLogger,
    NeuronTQDMProgressBar,
    NeuronXLAPrecisionPlugin,
)
from nxd_infer.lightning.strategy import NeuronXLAStrategy

__all__ = [
    "NeuronHooksCallback", "NeuronLTModule", "NeuronTQDMProgressBar", "NeuronTensorBoardLogger",
    "NeuronXLAPrecisionPlugin", "NeuronXLAStrategy",
]  # fmt: skip
