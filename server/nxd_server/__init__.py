"""Serve traced models: an in-process engine (:class:`LLM`), and an HTTP server on top of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_infer.util.lazy import lazy_names

if TYPE_CHECKING:
    from nxd_server.engine.sampling_params import SamplingParams
    from nxd_server.llm import LLM, CompletionOutput, RequestOutput

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {"nxd_server.llm": "LLM CompletionOutput RequestOutput", "nxd_server.engine.sampling_params": "SamplingParams"},
)
