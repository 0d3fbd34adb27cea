"""Families of installed packages, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

from tests.support.models.helpers import install


def test_looking_for_families_imports_none_and_no_torch(tmp_path):
    install(tmp_path, "slow_models", {"slow": "slow_models:SPEC"}, "raise SystemExit('imported')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from nxd_models import registry, spec\n"
        "print(registry.model_types()[-1], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["slow", "False"], done.stderr
