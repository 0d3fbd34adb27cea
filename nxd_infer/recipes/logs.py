"""Where the numbers of a training go: TensorBoard's files, and Lightning's loggers where the recipe wants them."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nxd_infer.errors import RecipeError
from nxd_infer.recipes.schema import ExpManager
from nxd_infer.trainer.first_rank import is_rank_zero
from nxd_infer.trainer.tensorboard import Number, TensorBoardLogger, number

OTHERS = {"wandb": "WandbLogger", "mlflow": "MLFlowLogger"}
"""Loggers of Lightning, by the package that each needs."""


def missing_packages(manager: ExpManager) -> dict[str, str]:
    """Return the keys of wanted loggers that cannot be made here, each with the package that is not installed."""
    wanted = [package for package in OTHERS if getattr(manager, f"create_{package}_logger")]
    needed = [(f"create_{package}_logger", one) for package in wanted for one in (package, "lightning")]
    return {key: one for key, one in needed if importlib.util.find_spec(one) is None}


class Logs:
    """All loggers of a job; only the first rank writes. ``initial``: the step that the job goes on from."""

    def __init__(self, manager: ExpManager, log_dir: Path, initial: int):
        self.tensorboard = TensorBoardLogger(log_dir, initial=initial) if manager.create_tensorboard_logger else None
        self.others: list[Any] = []
        if not is_rank_zero():
            return
        store = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{log_dir.absolute() / 'mlflow.db'}"
        defaults = {
            "wandb": {"save_dir": str(log_dir)},
            "mlflow": {"tracking_uri": store, "artifact_location": str(log_dir), "experiment_name": manager.name},
        }
        for package in OTHERS:
            if getattr(manager, f"create_{package}_logger"):
                given = getattr(manager, f"{package}_logger_kwargs")
                self.others.append(_lightning_logger(package, {**defaults[package], **given}))

    def log(self, step: int, numbers: Mapping[str, Number | None]) -> None:
        if self.tensorboard is not None:
            self.tensorboard.log(step, **numbers)
        for one in self.others:
            one.log_metrics({name: number(value) for name, value in numbers.items() if value is not None}, step)

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text, in TensorBoard alone."""
        if self.tensorboard is not None:
            self.tensorboard.text(step, name, text)

    def flush(self) -> None:
        """Write TensorBoard's numbers to its file."""
        if self.tensorboard is not None:
            self.tensorboard.flush()

    def close(self, status: str = "success") -> None:
        """Write what is left; ``status``: or "failed"."""
        if self.tensorboard is not None:
            self.tensorboard.close()
        for one in self.others:
            one.finalize(status)
        self.others = []


def _lightning_logger(package: str, arguments: Mapping[str, Any]) -> Any:
    try:
        made = getattr(importlib.import_module("lightning.pytorch.loggers"), OTHERS[package])(**arguments)
        made.experiment  # noqa: B018  # connects now, and not at the first numbers
    except Exception as error:  # whatever the package, its settings and its service have to say
        raise RecipeError(
            f"exp_manager.create_{package}_logger: it cannot be started: {' '.join(str(error).split())}; see "
            f"exp_manager.{package}_logger_kwargs"
        ) from error
    return made
