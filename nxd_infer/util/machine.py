"""Properties of this machine for the manifest: architecture, CPU features, library versions."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import re
import sys
from pathlib import Path


@functools.cache
def cpu_features() -> frozenset[str]:
    """Return the CPU feature names in ``/proc/cpuinfo`` (``avx2``, ...); empty without such a file."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            return frozenset(value.split())
    return frozenset()


def computes_bfloat16() -> bool:
    """Whether the processor has instructions for bfloat16, without which products are many times slower in it; where
    nothing tells, it is taken to have them."""
    features = cpu_features()
    return not features or not features.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})  # the last is Arm's


def architecture() -> str:
    """Return ``x86_64``, ``aarch64``, ..."""
    return platform.machine()


def torch_version() -> str:
    """The version of torch that is installed here, without importing it."""
    known = getattr(sys.modules.get("torch"), "__version__", None)  # another thread may be in the middle of its import
    return _installed_torch() if known is None else str(known)


@functools.cache
def _installed_torch() -> str:
    """As ``torch.__version__`` has it: the package's own version lacks the ``+cu128`` of some builds."""
    installed = importlib.metadata.distribution("torch")
    try:
        text = Path(str(installed.locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except OSError:
        return installed.version
    match = re.search(r"^__version__ = ['\"]([^'\"]+)", text, re.MULTILINE)
    return installed.version if match is None else match[1]


def torch_minor(version: str) -> str:
    """``"2.13.0+cpu"`` -> ``"2.13"``: the part of torch's version that compiled graphs depend on."""
    return ".".join(version.split("+")[0].split(".")[:2])


def versions() -> dict[str, str]:
    """Return ``manifest.versions`` for this machine, which traces."""
    return {"torch": torch_version(), "python": platform.python_version()}
