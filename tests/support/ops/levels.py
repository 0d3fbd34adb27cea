"""Instruction sets that a test asks the native kernels for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nxd_infer.native import NativeLibrary

LEVELS = ("portable", "avx2", "avx512", "avx512_bf16", "amx_bf16")
"""Each includes those before it; ``NXD_INFER_CPU_LEVEL`` takes them."""


def run_at(library: NativeLibrary, level: str, code: str, **variables: str) -> str:
    """What ``code`` prints in a process whose kernels are those of ``level``: it is read once, as ``variables`` are.

    Skips where the machine lacks ``level``: another one's kernels would run.
    """
    here = library.cpu_level()
    if LEVELS.index(level) > LEVELS.index(here):
        pytest.skip(f"this machine's best instructions are {here}, not {level}")
    environment = {**os.environ, "NXD_INFER_CPU_LEVEL": level, "OMP_NUM_THREADS": "2", **variables}
    check = f"from nxd_infer import native\nassert native.load().cpu_level() == {level!r}\n"
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", check + code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-2000:]
    return done.stdout.strip()
