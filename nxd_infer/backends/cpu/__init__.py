"""The backend of a plain CPU.

The modules in this folder need torch and are imported on first use: a server's process, which does not import torch,
reads the backend's facts and calls ``check_target``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_infer.util.lazy import lazy_names

if TYPE_CHECKING:
    from nxd_infer.backends.cpu import executable, lower, operators, placement, program

__all__ = ["executable", "lower", "operators", "placement", "program"]
__getattr__, __dir__ = lazy_names(__name__, modules=__all__)
