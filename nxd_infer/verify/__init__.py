"""Compare an artifact with the model that it was traced from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_infer.util.lazy import lazy_names

if TYPE_CHECKING:
    from nxd_infer.verify.artifact import Verification, verify_artifact

__all__ = ["Verification", "verify_artifact"]
__getattr__, __dir__ = lazy_names(__name__, {".artifact": " ".join(__all__)})
