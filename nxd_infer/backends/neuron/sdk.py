"""Which releases of Neuron's packages fit, by their versions alone."""

from __future__ import annotations

import importlib.metadata
import re

TORCH = "2.9"
"""The one torch for which torch_neuronx is published for Inf2 and Trn1."""
SDK = "Neuron SDK 2.29 to 2.32"
PIP = (
    "pip install -e '.[neuron]' in the checkout, in an environment of its own, with AWS' package index as "
    "--extra-index-url (the Neuron SDK's installation guide gives its address)"
)
INSTALL = f"install that of the {SDK}: {PIP}"
OLDEST = (2, 9, 0, 2, 13)
"""torch_neuronx of the first of these."""
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
        return f"torch_neuronx is not installed: {INSTALL}"
    numbers = tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))
    if numbers[:2] != OLDEST[:2]:
        return f"torch_neuronx {version} is not for torch {TORCH}, the last one for Inf2 and Trn1: {INSTALL}"
    if numbers < OLDEST:
        return f"torch_neuronx {version} is of an older SDK than was looked at: {INSTALL}"
    return ""
