"""Skips for what this release of torch cannot do, with the library's own words; for nothing else: they look for the
feature, not for ``availability()`` or a probe, so a machine without a compiler fails these tests."""

from __future__ import annotations

import pytest

from nxd_infer import native
from nxd_infer.backends import registry
from nxd_infer.backends.cpu.inductor import takes_march

HAS_NATIVE, HAS_INDUCTOR = native.has_stable_abi(), takes_march()
NO_NATIVE = "" if HAS_NATIVE else native.availability().reason
NO_INDUCTOR = "" if HAS_INDUCTOR else f"inductor: {registry.get('inductor').probe().reason}"

needs_native = pytest.mark.skipif(not HAS_NATIVE, reason=NO_NATIVE)
"""Of a test, a parameter or (``pytestmark``) a module that runs native operators."""
needs_inductor = pytest.mark.skipif(not HAS_INDUCTOR, reason=NO_INDUCTOR)
"""Of one that compiles graphs."""


def require_native() -> None:
    """Skip the test that is running, or the module that is being collected."""
    if not HAS_NATIVE:
        pytest.skip(NO_NATIVE, allow_module_level=True)
