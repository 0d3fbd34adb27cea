"""Scalars of a training job in TensorBoard's event files, written by rank 0.

Source: ``torch.utils.tensorboard``, which needs the package ``tensorboard`` (``nxd-infer[train]``).
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from torch import Tensor

from nxd_infer.errors import MissingPackageError
from nxd_infer.trainer.first_rank import is_rank_zero

__all__ = ["TensorBoardLogger"]

Number = float | int | Tensor
"""A number, or a one-element tensor on any device."""


def number(value: Number) -> float:
    """Return the value of a number or of a one-element tensor; this synchronises with its device."""
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


class TensorBoardLogger:
    """Writes ``(name, value, step)`` into ``log_dir``; view them with ``tensorboard --logdir``.

    All ranks can create one and make the same calls: only rank 0 writes. ``initial`` is the step from which a job
    resumes; scalars that an interrupted run wrote for later steps are hidden.

    Raises MissingPackageError, on every rank, if the package ``tensorboard`` is not installed.
    """

    def __init__(self, log_dir: str | os.PathLike[str], *, initial: int = 0):
        if importlib.util.find_spec("tensorboard") is None:
            raise MissingPackageError(
                f"TensorBoard scalars (log_dir={os.fspath(log_dir)!r}) need the package tensorboard: "
                "pip install 'nxd-infer[train]', or leave log_dir out",
                name="tensorboard",
            )
        self._writer: Any = None
        if is_rank_zero():
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(os.fspath(log_dir), purge_step=initial + 1 if initial else None)

    def log(self, step: int, **scalars: Number | None) -> None:
        """Write numbers of a step by name; a slash in a name creates a group. None is skipped."""
        if self._writer is not None:
            for name, value in scalars.items():
                if value is not None:
                    self._writer.add_scalar(name, number(value), step)

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text of a step."""
        if self._writer is not None:
            self._writer.add_text(name, text, step)

    def flush(self) -> None:
        """Write what is still in memory to the file."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Flush what is still in memory. Can be called more than once."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
