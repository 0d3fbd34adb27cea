"""New weights and adapters for running ranks.

Sharding them needs torch, which is imported on first use: a server that generates runs without it until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_infer.util.lazy import lazy_names

if TYPE_CHECKING:
    from nxd_infer.runtime.updates import adapters, weights

__all__ = ["adapters", "weights"]
__getattr__, __dir__ = lazy_names(__name__, modules=__all__)
