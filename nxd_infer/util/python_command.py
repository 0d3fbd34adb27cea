"""How this package starts Python processes of its own: none imports from the directory it happens to run in.

Somebody who traces a downloaded model stands in its directory, and a ``torch.py`` there must not be the child's torch.
"""

from __future__ import annotations

import json
import os
import site
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

_PACKAGES = ("nxd_infer", "nxd_server", "nxd_models", "torch", "torch_neuronx")
"""What a child imports from where this process has it, installed or not."""

# What `-P` does, which Python has from 3.11 on. `sys` is built in: importing it looks into no directory.
_SAFELY = "import sys; sys.path[:] = filter(None, sys.path)\n"


def python_code(code: str, *arguments: str) -> list[str]:
    """The command that runs ``code`` in a new interpreter, ``arguments`` behind ``sys.argv[0]``."""
    return [sys.executable, "-c", _SAFELY + code, *arguments]


def python_of_caller(code: str, *arguments: str) -> list[str]:
    """As :func:`python_code`, with the path of this process, not a safe one: for code that imports the caller's own.

    `json` is imported before it, and so is Python's own.
    """
    path = "import json; sys.path[:] = json.loads(sys.argv.pop(1))\n"
    return python_code(path + code, json.dumps(sys.path), *arguments)


def preparation() -> dict[str, Any]:
    """What ``multiprocessing.spawn.prepare`` needs to import what is the caller's: this program's script, unless there
    is no file of it, and where it runs."""
    from multiprocessing import spawn

    found = spawn.get_preparation_data("")
    wanted = ("sys_argv", "dir", "orig_dir", "init_main_from_name", "init_main_from_path")
    kept = {key: found[key] for key in wanted if key in found}
    if not os.path.exists(kept.get("init_main_from_path", "/")):  # `<stdin>`
        del kept["init_main_from_path"]
    return kept


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
