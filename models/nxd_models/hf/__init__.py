"""Hugging Face model directories: configuration files, and weights that are read by slices.

Only ``weights`` needs torch; it is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_infer.util.lazy import lazy_names

if TYPE_CHECKING:
    from nxd_models.hf import weights

__all__ = ["weights"]
__getattr__, __dir__ = lazy_names(__name__, modules=__all__)
