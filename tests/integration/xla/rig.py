"""What the tests on real torch-xla share: whether it is here, and programs in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from nxd_infer.backends import registry
from nxd_infer.processes.command import child_environment

SECONDS = 800
"""A guard against replicas that wait for each other, however busy the machine is."""


def require() -> None:
    """Skip the module where the backend cannot run."""
    found = registry.get("xla").probe()
    if not found:
        pytest.skip(found.reason, allow_module_level=True)


def in_a_process(module: str, *arguments: str, status: int = 0) -> Any:
    """Run ``tests/integration/xla/<module>.py`` in a fresh process, and return the JSON that it prints last.

    With another ``status`` than 0, its output as text.
    """
    done = subprocess.run(
        [sys.executable, "-m", f"tests.integration.xla.{module}", *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=child_environment(),
    )
    assert done.returncode == status, f"{done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1]) if status == 0 else done.stdout + done.stderr
