"""The backends of a plain CPU: cpu (a prebuilt loop runs the graph) and inductor (compiled).

The modules in this folder need torch and are imported on first use: a server's process, which does not import torch,
reads a backend's facts and calls ``check_target``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_infer.util.lazy import lazy_names

if TYPE_CHECKING:
    from nxd_infer.backends.cpu import compiling, executable, lower, operators, package, placement, program

__all__ = ["compiling", "executable", "lower", "operators", "package", "placement", "program"]
__getattr__, __dir__ = lazy_names(__name__, modules=__all__)
