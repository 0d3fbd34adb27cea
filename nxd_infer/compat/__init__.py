"""Let unchanged scripts ``import neuronx_distributed``.

::

    import nxd_infer.compat
    nxd_infer.compat.install()

    import neuronx_distributed as nxd                               # this package
    from neuronx_distributed.parallel_layers import layers          # nxd_infer.parallel_layers.layers, the same object
    from torch_neuronx import BucketModelConfig                     # nxd_infer.trace.BucketModelConfig

or, without touching the script: ``python -m nxd_infer.compat script.py arguments...``.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from nxd_infer.errors import NxdError

ALIAS = "neuronx_distributed"
HELPER = "torch_neuronx"
TARGETS = {ALIAS: "nxd_infer", HELPER: "nxd_infer.compat.torch_neuronx"}
MOVED = {
    f"{ALIAS}.trace.trace": "nxd_infer.trace.api",
    f"{ALIAS}.trainer.checkpoint": "nxd_infer.checkpoint.api",
    f"{ALIAS}.trainer.model": "nxd_infer.modules.nxd_model",
}
"""Modules with another path than in the reference; all others have the same path."""


class AliasError(NxdError, ImportError):
    """The alias would hide an installed package."""


class _AliasFinder(importlib.abc.MetaPathFinder):
    """Finds an alias as ours, for example ``neuronx_distributed[.x]`` as ``nxd_infer[.x]``."""

    def __init__(self, alias: str):
        self.alias, self.target = alias, TARGETS[alias]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != self.alias:
            return None
        if fullname != self.alias and sys.modules.get(self.alias) is not sys.modules.get(self.target):
            return None  # of a real package
        ours = MOVED.get(fullname, self.target + fullname.removeprefix(self.alias))
        try:
            found = importlib.util.find_spec(ours)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ModuleNotFoundError(
                f"{fullname} was looked for as {ours}, which this package does not have", name=fullname
            )
        return importlib.machinery.ModuleSpec(
            fullname, _AliasLoader(ours), is_package=found.submodule_search_locations is not None
        )


class _AliasLoader(importlib.abc.Loader):
    """Imports the module under its own name and returns it: one object under two names."""

    def __init__(self, name: str):
        self.name = name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.name)
        self._own = getattr(module, "__spec__", None)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # It has been executed under its own name; the import system has just renamed its spec.
        if self._own is not None:
            module.__spec__ = self._own


def install(*, force: bool = False) -> None:
    """Alias ``neuronx_distributed`` and its submodules to this package, in this process. Idempotent.

    ``torch_neuronx`` becomes an alias of :mod:`nxd_infer.compat.torch_neuronx` unless that package is installed: an
    installed one is never hidden, and its BucketModelConfig works here. Rank processes of ``parallel_model_trace``
    import the script again, and get the aliases if their caller has them.

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
    sys.meta_path.insert(0, _AliasFinder(ALIAS))
    sys.meta_path.append(_AliasFinder(HELPER))  # asked when no other finder knows one


def is_installed() -> bool:
    """Return whether the aliases are installed in this process."""
    return any(isinstance(finder, _AliasFinder) for finder in sys.meta_path)


def uninstall() -> None:
    """Remove the aliases; modules that are already imported stay."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _AliasFinder)]
    for name in [name for name in sys.modules if name == ALIAS or name.startswith(f"{ALIAS}.")]:
        del sys.modules[name]
    if HELPER in sys.modules and sys.modules[HELPER] is sys.modules.get(TARGETS[HELPER]):
        del sys.modules[HELPER]


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
    sys.argv = sys.argv[1:]
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        # For `-m` Python puts the current directory first; a script expects its own directory.
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
