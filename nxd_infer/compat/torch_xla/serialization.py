"""``torch_xla.utils.serialization``: what ranks save and load, in one file instead of one for each tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nxd_infer.compat.torch_xla import xla_model
from nxd_infer.layout.files.one_rank import read_rank


def save(data: Any, path: str | Path, master_only: bool = True, global_master: bool = False) -> None:
    """Save as :func:`xla_model.save` does, and wait for all ranks."""
    xla_model.save(data, path, master_only, global_master)
    xla_model.rendezvous("torch_xla.utils.serialization.save")


def load(path: str | Path) -> Any:
    """Return what was saved, here or by torch_xla, on the CPU.

    Raises CheckpointError for a file that is missing, damaged, or holds more than tensors and plain values.
    """
    return read_rank(Path(path))[0]
