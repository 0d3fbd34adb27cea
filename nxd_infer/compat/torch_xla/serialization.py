"""``torch_xla.utils.serialization``: what ranks save and load, in one file instead of one for each tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nxd_infer.compat.torch_xla.xla_model import save
from nxd_infer.layout.files.one_rank import read_rank

__all__ = ["load", "save"]


def load(path: str | Path) -> Any:
    """Return what was saved, here or by torch_xla, on the CPU.

    Raises CheckpointError for a file that is missing, damaged, or holds more than tensors and plain values.
    """
    return read_rank(Path(path))[0]
