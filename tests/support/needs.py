"""Skips for what this release of torch cannot do, with the library's own words; for nothing else: they look for the
feature, not for ``availability()`` or a probe, so a machine without a compiler fails these tests."""

from __future__ import annotations

import pytest

from nxd_infer import native

HAS_NATIVE = native.has_stable_abi()
NO_NATIVE = "" if HAS_NATIVE else native.availability().reason

needs_native = pytest.mark.skipif(not HAS_NATIVE, reason=NO_NATIVE)
"""Of a test, a parameter or (``pytestmark``) a module that runs native operators."""


def require_native() -> None:
    """Skip the test that is running, or the module that is being collected."""
    if not HAS_NATIVE:
        pytest.skip(NO_NATIVE, allow_module_level=True)
