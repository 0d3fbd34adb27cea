"""Weights of Hugging Face model directories, read by slices under a model's names; a GGUF file as such a directory;
a directory's tokenizer as transformers reads it.

Only ``weights`` needs torch; it is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_infer.util.lazy import lazy_names

if TYPE_CHECKING:
    from nxd_infer.hugging_face import weights

__all__ = ["weights"]
__getattr__, __dir__ = lazy_names(__name__, modules=__all__)
