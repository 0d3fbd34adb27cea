"""Commands for starting our Python processes, none of which imports from the current directory.

A user who traces a downloaded model may be in its directory, and a ``torch.py`` there must not replace torch.
"""

from __future__ import annotations

import json
import os
import site
import sys
from importlib.machinery import PathFinder
from multiprocessing import spawn
from pathlib import Path
from typing import Any

_PACKAGES = ("nxd_infer", "nxd_server", "nxd_models", "torch", "torch_neuronx")
"""Packages that a child imports from the same place as this process, installed or not."""

# What `-P` does in Python 3.11 and later. `sys` is built in, so importing it reads no directory.
_SAFELY = "import sys; sys.path[:] = filter(None, sys.path)\n"


def python_code(code: str, *arguments: str) -> list[str]:
    """Return the command that runs ``code`` in a new interpreter, with ``arguments`` after ``sys.argv[0]``."""
    return [sys.executable, "-c", _SAFELY + code, *arguments]


def python_of_caller(code: str, *arguments: str) -> list[str]:
    """Like :func:`python_code`, with this process's path instead of a safe one: for code that imports the caller's.

    `json` is imported first, so it is Python's own.
    """
    path = "import json; sys.path[:] = json.loads(sys.argv.pop(1))\n"
    return python_code(path + code, json.dumps(sys.path), *arguments)


importing_script = False
"""Whether this process is one that is importing its caller's script."""


def import_script(preparation: dict[str, Any]) -> None:
    """Import the caller's code, in its directory, from what :func:`preparation` has returned there."""
    global importing_script
    importing_script = True
    spawn.prepare(preparation)
    importing_script = False


def preparation() -> dict[str, Any]:
    """Return what :func:`import_script` needs: the program's script, if it has a file, and the working directory."""
    data = spawn.get_preparation_data("")
    names = ("sys_argv", "dir", "orig_dir", "init_main_from_name", "init_main_from_path")
    kept = {name: data[name] for name in names if name in data}
    if not os.path.exists(kept.get("init_main_from_path", "/")):  # `<stdin>`
        del kept["init_main_from_path"]
    return kept


def python_module(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a module as a program: ``python -P -m name arguments``."""
    return python_code(f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)", *arguments)


def child_environment(**changes: str) -> dict[str, str]:
    """Return this process's environment without ``PYTHONPATH`` and ``PYTHONHOME``, with the path to our packages and
    with ``changes``."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    if roots := _roots():
        environment["PYTHONPATH"] = os.pathsep.join(roots)
    return {**environment, "PYTHONSAFEPATH": "1", **changes}  # also for processes that the child starts


def environment_of_caller() -> dict[str, str]:
    """Like :func:`child_environment`, with this process's path, so that modules are found where this process, and
    :func:`python_of_caller`, find them."""
    path = [entry for entry in sys.path if os.path.isabs(entry) and os.pathsep not in entry]
    return child_environment(PYTHONPATH=os.pathsep.join(path))


def _roots() -> list[str]:
    """Return the directories that hold our packages and are not on every interpreter's path, such as a checkout's."""
    roots = []
    places = [entry for entry in sys.path if os.path.isabs(entry)]  # not "", which means a REPL's current directory
    for name in _PACKAGES:
        spec = getattr(sys.modules.get(name), "__spec__", None) or PathFinder.find_spec(name, places)
        if spec is not None and spec.origin is not None:
            roots.append(str(Path(spec.origin).absolute().parent.parent))
    known = {*site.getsitepackages(), site.getusersitepackages()}
    return [root for root in dict.fromkeys(roots) if root not in known]
