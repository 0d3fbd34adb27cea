"""What backends on XLA devices share: a graph in host and device parts, the device's as HLO, and the host's run.

These modules need torch or torch_xla and are imported on first use; ``base`` needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_infer.util.lazy import lazy_names

if TYPE_CHECKING:
    from nxd_infer.backends.hlo import lower, parts, placement, xla_api

__all__ = ["lower", "parts", "placement", "xla_api"]
__getattr__, __dir__ = lazy_names(__name__, modules=__all__)
