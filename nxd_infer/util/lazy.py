"""Names of a package that are imported on first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str] | None = None, modules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of ``package``::

        __getattr__, __dir__ = lazy_names(__name__, {".engine": "Engine Ticket"}, modules=["events"])

    Args:
        homes: modules and the names of each; one that begins with a dot is inside the package.
        modules: submodules that are also names of the package.

    Type checkers need the same names in an ``if TYPE_CHECKING`` block of the package. Code that must not import a slow
    module at its start imports the package instead, and writes ``package.module.name``.
    """
    found = {name: module for module, names in (homes or {}).items() for name in names.split()}

    def find(name: str) -> Any:
        if name in found:
            value = getattr(importlib.import_module(found[name], package), name)
        elif name in modules:
            value = importlib.import_module(f".{name}", package)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted({*vars(sys.modules[package]), *found, *modules})
