"""Backends that this machine has not of itself: another package's, and a Neuron machine of stand-ins."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nxd_infer.backends import registry
from tests.support.neuron.machines import neuron_machine

PLUGIN = str(Path(__file__).with_name("plugin"))


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """They are there inside the block, as if they were installed, for this process and those that it starts."""
    before = os.environ.get("PYTHONPATH", "")
    with tempfile.TemporaryDirectory(prefix="nxd-machine-") as root, neuron_machine(Path(root)):
        sys.path.append(PLUGIN)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), PLUGIN]))
        try:
            yield
        finally:
            sys.path.remove(PLUGIN)
            os.environ["PYTHONPATH"] = before


def _names() -> tuple[str, ...]:
    with installed():
        return *(name for name in registry.BUILT_IN if registry.get(name).probe_compiler()), "lockstep"


NAMES = _names()
"""Those that can trace here, and the other package's."""
