"""The other package's directory on the path, of this process and of those that it starts."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from nxd_infer.backends import registry

PLUGIN = str(Path(__file__).with_name("plugin"))
NAMES = (*(name for name in registry.BUILT_IN if registry.get(name).probe_compiler()), "lockstep")
"""Those that can trace here, and the other package's."""


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """The plugin's packages are there inside the block, as if they were installed."""
    before = os.environ.get("PYTHONPATH", "")
    sys.path.append(PLUGIN)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [before, PLUGIN]))
    try:
        yield
    finally:
        sys.path.remove(PLUGIN)
        os.environ["PYTHONPATH"] = before
