"""Which releases of Neuron's packages fit, by their versions alone."""

from __future__ import annotations

import importlib.metadata
import re

TORCH = "2.9"
"""The one torch for which torch_neuronx is published for Inf2 and Trn1."""
SDK = "Neuron SDK 2.29 to 2.32"
FAKE = "+fake"
"""The end of the version of stand-ins for torch_neuronx and neuronx-cc, which tests use."""


def installed() -> str:
    """The version of torch_neuronx; empty where there is none."""
    try:
        return importlib.metadata.version("torch_neuronx")
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_version(version: str) -> str:
    """Why torch_neuronx of ``version`` cannot be used; empty when it can."""
    if not version:
        return f"torch_neuronx is not installed: install that of the {SDK}, with torch {TORCH}"
    if not re.match(re.escape(TORCH) + r"\.", version):
        return (
            f"torch_neuronx {version} is not for torch {TORCH}, the last one for Inf2 and Trn1: install that of the "
            f"{SDK}"
        )
    return ""
