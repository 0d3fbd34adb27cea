"""The xla backend: HLO run by torch_xla on this machine's CPU, all ranks in one process.

These modules need torch_xla and are imported on first use: a server's process reads the backend's facts without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_infer.util.lazy import lazy_names

if TYPE_CHECKING:
    from nxd_infer.backends.xla import executable, replicas

__all__ = ["executable", "replicas"]
__getattr__, __dir__ = lazy_names(__name__, modules=__all__)
