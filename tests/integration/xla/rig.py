"""What the tests on real torch-xla share: whether it is here, and programs in a process of their own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from nxd_infer.backends import registry
from nxd_infer.trace import assemble
from nxd_infer.util.python_command import child_environment

SECONDS = 800
"""A guard against replicas that wait for each other, however busy the machine is."""


def require() -> None:
    """Skip the module where the backend cannot run."""
    found = registry.get("xla").probe()
    if not found:
        pytest.skip(found.reason, allow_module_level=True)


@contextlib.contextmanager
def lower_here() -> Iterator[None]:
    """Traces inside the block lower their graphs in this process: each would start two, which import torch_xla."""

    def compile_graphs(backend: str, graph_dirs: Sequence[Path], options: Mapping[str, Any], **more: Any) -> None:
        for graph_dir in graph_dirs:
            registry.get(backend).compile(graph_dir, options)
            more["report"](graph_dir, 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "compile_graphs", compile_graphs)
        yield


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
