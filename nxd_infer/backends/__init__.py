"""Backends: compile a rank's graphs, place its tensors, run it. See :mod:`nxd_infer.backends.base`.

Only ``checks`` needs torch; it is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_infer.backends.registry import get, names
from nxd_infer.util.lazy import lazy_names

if TYPE_CHECKING:
    from nxd_infer.backends import checks

__all__ = ["checks", "get", "names"]
__getattr__, __dir__ = lazy_names(__name__, modules=["checks"])
