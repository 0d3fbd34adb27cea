"""``nxd-infer demo``: train, trace and serve end to end, on text that ships with Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_infer.util.lazy import lazy_names

if TYPE_CHECKING:
    from nxd_infer.cli.demo import run

__all__ = ["run"]
__getattr__, __dir__ = lazy_names(__name__, modules=__all__)
