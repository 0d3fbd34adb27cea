"""The torch_xla that is installed, without importing it: an import takes seconds, and starts the device's runtime."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

from nxd_infer.backends.base import Availability
from nxd_infer.util.machine import architecture, torch_minor, torch_version
from nxd_infer.util.processors import available_cores

INSTALL = "pip install -e '.[xla]' in the checkout, in an environment of its own"
"""Of its own: it brings another torch than the default backend needs."""


def probe() -> Availability:
    """Whether graphs can be lowered here, by the packages' versions."""
    found = {"torch": torch_version()}
    try:
        found["torch_xla"] = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        return Availability(False, f"torch_xla is not installed: {INSTALL}", found)
    ours, needed = torch_minor(found["torch"]), torch_minor(found["torch_xla"])
    if ours != needed:
        reason = f"torch_xla {found['torch_xla']} needs torch {needed}, and this is torch {found['torch']}"
        return Availability(False, f"{reason}: {INSTALL}", found)
    return Availability(True, "", found, {f"{architecture()} processor": len(available_cores())})


def compiler() -> str:
    """What makes the HLO, with its version."""
    return f"torch_xla {probe().versions.get('torch_xla', '')}"


def environment(degree: int) -> Mapping[str, str]:
    """What torch_xla finds in its environment; it reads that when it is imported."""
    return {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(degree),
        # A program that takes a tensor's memory for a result waits for its last reader, with the lock held that the
        # other replicas need to get there.
        "XLA_ENABLE_PARAM_ALIASING": "0",
        # A replica's program holds a thread of this pool while it waits for the others; by default there are as many as
        # processors.
        "XLA_THREAD_POOL_SIZE": str(2 * degree),
        # Scripts that train on Trainium set these: they would put other types into the HLO than its table says, without
        # a word, and into the cache for all who compile the same graph.
        **dict.fromkeys(("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "XLA_USE_32BIT_LONG"), "0"),
        **dict.fromkeys(("XLA_DISABLE_FUNCTIONALIZATION", "XLA_USE_SPMD"), "0"),
    }
