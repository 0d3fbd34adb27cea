"""Let unchanged scripts ``import neuronx_distributed``.

::

    import nxd_infer.compat
    nxd_infer.compat.install()

    import neuronx_distributed as nxd                               # this package
    from neuronx_distributed.parallel_layers import layers          # nxd_infer.parallel_layers.layers, the same object
    from torch_neuronx import BucketModelConfig                     # nxd_infer.trace.BucketModelConfig

A module whose path and names are the same here is the same object under both names. One that differs answers what
:mod:`nxd_infer.compat.names` lists for it, and otherwise what ours has; setting an attribute sets ours.

or, without touching the script: ``python -m nxd_infer.compat script.py arguments...``.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing.spawn
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from nxd_infer.compat.names import ROOTS
from nxd_infer.compat.removed import RemovedNamesFinder, give_back
from nxd_infer.compat.views import View, is_old, is_view, modules_below, our_module, our_path
from nxd_infer.errors import NxdError
from nxd_infer.util.suggest import did_you_mean

ALIAS = "neuronx_distributed"
XLA = "torch_xla"
DOOR: list[str] = []
"""What stands before the script in the command that runs it again: ``-m nxd_infer.compat`` if that has begun it."""


class AliasError(NxdError, ImportError):
    """The alias would hide an installed package."""


def _is_alias(name: str) -> bool:
    """Return whether the module imported as ``name`` is one of ours: those below a real package are not."""
    module = sys.modules.get(name)
    return isinstance(module, View) or getattr(module, "__name__", name) != name


class _AliasFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of ``roots``, for example ``neuronx_distributed.x`` as ``nxd_infer.x``."""

    def __init__(self, *roots: str):
        self.roots = roots

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        below = any(fullname.startswith(f"{root}.") for root in self.roots)
        if not below and not any(f"{root}.".startswith(f"{fullname}.") for root in self.roots):
            return None
        parent = fullname.rpartition(".")[0]
        if below and not _is_alias(parent):
            return None  # of a real package
        if not is_old(fullname):
            place, (_, _, last) = our_path(fullname), fullname.rpartition(".")
            looked = f" was looked for as {place}, which this package does not have"
            near = did_you_mean(last, modules_below(parent))
            raise ModuleNotFoundError(
                f"{fullname}{looked if place else ' has nothing of its kind here'}{near}", name=fullname
            )
        ours = None if is_view(fullname) else our_module(fullname)
        found = None if ours is None else importlib.util.find_spec(ours)
        return importlib.machinery.ModuleSpec(
            fullname, _AliasLoader(ours), is_package=found is None or found.submodule_search_locations is not None
        )


class _AliasLoader(importlib.abc.Loader):
    """Returns ours, imported under its own name (one object under two names), or else a view of it."""

    def __init__(self, ours: str | None):
        self.ours = ours

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        if spec.name == ALIAS and importlib.machinery.PathFinder.find_spec(XLA) is None:
            importlib.import_module(XLA)  # as the old package does: its users take "xla" devices from then on
        module = View(spec.name) if self.ours is None else importlib.import_module(self.ours)
        if spec.name == XLA:
            importlib.import_module("nxd_infer.compat.torch_xla.host").install()
        self._own = getattr(module, "__spec__", None)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # It has been executed under its own name; the import system has just renamed its spec.
        if self._own is not None:
            module.__spec__ = self._own


def install(*, force: bool = False) -> None:
    """Alias ``neuronx_distributed`` and its submodules to this package, in this process. Idempotent.

    ``torch_neuronx`` and ``optimum.neuron`` are answered unless the package is installed: an installed one is never
    hidden. An installed torch_xla gets names back that its newer releases lack. Rank processes of
    ``parallel_model_trace`` and processes of :mod:`multiprocessing` import the script again, and get the aliases if
    their caller has them.

    Raises AliasError if a package ``neuronx_distributed`` is installed or imported; ``force=True`` hides it.
    """
    if is_installed():
        return
    there = _found()
    if there is not None and not force:
        raise AliasError(
            f"a package {ALIAS} is installed ({there}); uninstall it, or pass force=True to hide it in this process"
        )
    for name in [name for name in sys.modules if name == ALIAS or name.startswith(f"{ALIAS}.")]:
        del sys.modules[name]
    if "USE_TORCH_XLA" not in os.environ:  # read by accelerate and transformers when they are imported
        os.environ["USE_TORCH_XLA"] = "0"
        if (asked := sys.modules.get("transformers.utils.import_utils")) is not None:
            vars(asked)["USE_TORCH_XLA"] = "0"  # what it looks at whenever it asks for torch_xla
    sys.meta_path[:0] = [_AliasFinder(ALIAS), RemovedNamesFinder()]
    give_back()
    sys.meta_path.append(_AliasFinder(*(ROOTS.keys() - {ALIAS})))  # asked when no other finder knows a name
    multiprocessing.spawn.get_preparation_data = _prepare_with_aliases


def is_installed() -> bool:
    """Return whether the aliases are installed in this process."""
    return any(isinstance(finder, _AliasFinder) for finder in sys.meta_path)


def uninstall() -> None:
    """Remove the aliases; modules that are already imported stay."""
    sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, _AliasFinder | RemovedNamesFinder)]
    old = [name for name in sys.modules if any(f"{name}.".startswith(f"{root.partition('.')[0]}.") for root in ROOTS)]
    for name in filter(_is_alias, old):
        del sys.modules[name]
    multiprocessing.spawn.get_preparation_data = _prepare
    if (xla := sys.modules.get("nxd_infer.compat.torch_xla.host")) is not None:
        xla.uninstall()


_prepare = multiprocessing.spawn.get_preparation_data


def _prepare_with_aliases(name: str) -> dict[str, Any]:
    """Return what a process that multiprocessing spawns needs: it imports the script before anything of ours."""
    return {**_prepare(name), "nxd_infer.compat": _Installs()}


class _Installs:
    """Installs the aliases where it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        path = [place for place in sys.path if isinstance(place, str)]  # others are nothing to Python
        code = f"import sys; sys.path[:] = {path!r}; from nxd_infer import compat; compat.install(force=True)"
        return exec, (code,)


def _found() -> str | None:
    """Return where a real package of that name is, or None."""
    loaded = sys.modules.get(ALIAS)
    if loaded is not None:
        return getattr(loaded, "__file__", None) or "imported already"
    found = importlib.util.find_spec(ALIAS)
    return None if found is None else found.origin or "a namespace package"


def main() -> None:
    """Run a script with the aliases installed."""
    import runpy

    usage = "usage: python -m nxd_infer.compat script.py [arguments...]"
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        raise SystemExit(usage)
    if not Path(sys.argv[1]).exists():
        raise SystemExit(f"there is no {sys.argv[1]!r}; {usage}")
    install()
    DOOR[:] = "-m", __name__
    sys.argv = sys.argv[1:]
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        # For `-m` Python puts the current directory first; a script expects its own directory.
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except ImportError as error:
        if match := re.match(r"cannot import name '(\w+)'", error.msg):
            error.msg += did_you_mean(match[1], dir(sys.modules.get(error.name or "")))
        raise
