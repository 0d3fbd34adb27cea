"""Skips for what this release of torch cannot do, with the library's own words as the reason; for nothing else."""

from __future__ import annotations

import pytest

from nxd_infer import native

HAS_NATIVE = native.has_stable_abi()
"""Not ``availability()``: a machine without a compiler fails these tests."""
NO_NATIVE = native.availability().reason if not HAS_NATIVE else ""

needs_native = pytest.mark.skipif(not HAS_NATIVE, reason=NO_NATIVE)
"""Of a test, a class, a parameter or (``pytestmark``) a module that runs native operators, or compiles for several
ranks."""


def require_native() -> None:
    """Skip the test that is running, or the module that is being collected."""
    if not HAS_NATIVE:
        pytest.skip(NO_NATIVE, allow_module_level=True)
