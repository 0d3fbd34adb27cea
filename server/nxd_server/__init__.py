"""Serve traced models: the engine in this process (:class:`LLM`), and an HTTP server over it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nxd_server.engine.sampling_params import SamplingParams
    from nxd_server.llm import LLM, CompletionOutput, RequestOutput

_HOMES = {
    "LLM": "nxd_server.llm",
    "CompletionOutput": "nxd_server.llm",
    "RequestOutput": "nxd_server.llm",
    "SamplingParams": "nxd_server.engine.sampling_params",
}

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'nxd_server' has no attribute {name!r}")
