"""``nxd-infer bench``: requests to a server of OpenAI's routes, and what they took."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_infer.util.lazy import lazy_names

if TYPE_CHECKING:
    from nxd_infer.cli.load import options, report, run, streams

__all__ = ["options", "report", "run", "streams"]
__getattr__, __dir__ = lazy_names(__name__, modules=__all__)
