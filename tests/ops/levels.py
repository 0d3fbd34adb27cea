"""Instruction sets that a test asks the native kernels for."""

from __future__ import annotations

import pytest

from nxd_infer.native import NativeLibrary

LEVELS = ("portable", "avx2", "avx512", "avx512_bf16", "amx_bf16")
"""Each includes those before it; ``NXD_CPU_LEVEL`` takes them."""


def require(library: NativeLibrary, level: str) -> None:
    """Skip where the machine lacks ``level``: its kernels would run another one's."""
    here = library.cpu_level()
    if LEVELS.index(level) > LEVELS.index(here):
        pytest.skip(f"this machine's best instructions are {here}, not {level}")
