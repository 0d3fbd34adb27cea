"""The command line, ``nxd-infer``. A command's module is imported when the command runs, so ``--help`` is fast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_infer.util.lazy import lazy_names

if TYPE_CHECKING:
    from nxd_infer.cli import ckpt, doctor, generate, load, pipeline_plan, port, top, trace, train, verify

__all__ = ["ckpt", "doctor", "generate", "load", "pipeline_plan", "port", "top", "trace", "train", "verify"]
__getattr__, __dir__ = lazy_names(__name__, modules=__all__)
