"""Where the numbers of a training go: TensorBoard's files, and Lightning's loggers where the recipe wants them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nxd_infer.errors import MissingPackageError
from nxd_infer.recipes.schema import ExpManager
from nxd_infer.trainer.tensorboard import Number, TensorBoardLogger, is_rank_zero, number

OTHERS = {"wandb": "WandbLogger", "mlflow": "MLFlowLogger"}
"""Loggers of Lightning, by the package that each needs."""


class Logs:
    """All loggers of a job; only the first rank writes. ``initial``: the step that the job goes on from."""

    def __init__(self, manager: ExpManager, log_dir: Path, initial: int):
        self.tensorboard = TensorBoardLogger(log_dir, initial=initial) if manager.create_tensorboard_logger else None
        self.others: list[Any] = []
        for package, name in OTHERS.items():
            if getattr(manager, f"create_{package}_logger"):
                made = _lightning_logger(package, name)
                if is_rank_zero():
                    self.others.append(made(**getattr(manager, f"{package}_logger_kwargs")))

    def log(self, step: int, numbers: Mapping[str, Number | None]) -> None:
        if self.tensorboard is not None:
            self.tensorboard.log(step, **numbers)
        for one in self.others:
            one.log_metrics({name: number(value) for name, value in numbers.items() if value is not None}, step)

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text, in TensorBoard alone."""
        if self.tensorboard is not None:
            self.tensorboard.text(step, name, text)

    def close(self) -> None:
        if self.tensorboard is not None:
            self.tensorboard.close()
        for one in self.others:
            one.finalize("success")
        self.others = []


def _lightning_logger(package: str, name: str) -> Any:
    for needed in ("lightning", package):
        if importlib.util.find_spec(needed) is None:
            raise MissingPackageError(
                f"exp_manager.create_{package}_logger needs the package {needed}: pip install {needed}, or set it to "
                "false",
                name=needed,
            )
    return getattr(importlib.import_module("lightning.pytorch.loggers"), name)
