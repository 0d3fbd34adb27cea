"""Plugins of a job: the progress bar and the TensorBoard logger, which rank 0 alone writes, and the precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import Precision, XLAPrecision

__all__ = ["NeuronHooksCallback", "NeuronTQDMProgressBar", "NeuronTensorBoardLogger", "NeuronXLAPrecisionPlugin"]


class NeuronHooksCallback(Callback):
    """Does nothing: it calls hooks at the ends of XLA's steps, and here every operator has run when its call ends."""


class NeuronTQDMProgressBar(TQDMProgressBar):
    """Lightning's bar, on the first rank only, with the metrics that were logged with ``prog_bar=True``."""

    def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, int | str | float | dict[str, float]]:
        shown = super().get_metrics(trainer, pl_module)
        shown.pop("v_num", None)  # the logger's number of this run
        return shown


class NeuronTensorBoardLogger(TensorBoardLogger):
    """Writes TensorBoard event files under ``save_dir/name/version``, once: every rank has the same losses.

    ``log_rank0`` is accepted: rank 0 writes.
    ``print_step``: the step that metrics are written under; None for Lightning's own, which counts batches, and -1 to
    write nothing, as while gradients are accumulated. NeuronLTModule sets it, and so may a training step of your own.
    """

    print_step: int | None = None

    def __init__(
        self,
        save_dir: str | Path,
        *,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        log_rank0: bool = False,
        **kwargs: Any,
    ):
        super().__init__(save_dir, name=name, version=version, **kwargs)

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Write numbers by name."""
        if self.print_step != -1:
            super().log_metrics(metrics, step if self.print_step is None else self.print_step)


class NeuronXLAPrecisionPlugin(XLAPrecision):
    """Parameters keep the dtype that the model function gives them; the optimizer's options say what is in float32.

    Master weights and float32 sums of gradients are ``mixed_precision_config`` of the nxd_config. Without the plugin,
    ``Trainer(precision="bf16-true")`` converts the model, and ``"bf16-mixed"`` runs its operators under autocast.
    """

    def __init__(self) -> None:
        Precision.__init__(self)  # XLA's needs torch_xla
        self._desired_dtype = torch.get_default_dtype()

    optimizer_step, teardown = Precision.optimizer_step, Precision.teardown
