"""How this package starts Python processes of its own: none imports from the directory it happens to run in.

Somebody who traces a downloaded model stands in its directory, and a ``torch.py`` there must not be the child's torch.
"""

from __future__ import annotations

import os
import site
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_PACKAGES = ("nxd_infer", "nxd_server", "nxd_models", "torch")
"""What a child imports from where this process has it, installed or not."""

# What `-P` does, which Python has from 3.11 on. `sys` is built in: importing it looks into no directory.
_SAFELY = "import sys; sys.path[:] = filter(None, sys.path)\n"


def python_code(code: str, *arguments: str) -> list[str]:
    """The command that runs ``code`` in a new interpreter, ``arguments`` behind ``sys.argv[0]``."""
    return [sys.executable, "-c", _SAFELY + code, *arguments]


def python_module(name: str, *arguments: str) -> list[str]:
    """The command that runs a module as a program: ``python -P -m name arguments``."""
    return python_code(f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)", *arguments)


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment without its ``PYTHONPATH`` and ``PYTHONHOME``, with the way to our packages, and with
    ``changes``."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    if roots := _roots():
        environment["PYTHONPATH"] = os.pathsep.join(roots)
    return {**environment, "PYTHONSAFEPATH": "1", **changes}  # for what the child starts in its turn as well


def _roots() -> list[str]:
    """The directories that hold our packages and are not on the path of every interpreter: a checkout's, say."""
    found = []
    places = [entry for entry in sys.path if os.path.isabs(entry)]  # not "": a REPL has it, for wherever it stands now
    for name in _PACKAGES:
        spec = getattr(sys.modules.get(name), "__spec__", None) or PathFinder.find_spec(name, places)
        if spec is not None and spec.origin is not None:
            found.append(str(Path(spec.origin).absolute().parent.parent))
    known = {*site.getsitepackages(), site.getusersitepackages()}
    return [root for root in dict.fromkeys(found) if root not in known]
