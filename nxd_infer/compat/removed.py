"""Names that newer releases of the real torch_xla have removed, which old scripts still call."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def _of_runtime(name: str) -> Callable[..., int]:
    return lambda defval=0: getattr(importlib.import_module("torch_xla.runtime"), name)()


REMOVED: dict[str, dict[str, Callable[..., Any]]] = {
    "torch_xla.core.xla_model": {
        "get_local_ordinal": _of_runtime("local_ordinal"),
        "get_ordinal": _of_runtime("global_ordinal"),
        "xrt_world_size": _of_runtime("world_size"),
    },
    "torch_xla.runtime": {"using_pjrt": lambda: True},
}


def give_back() -> None:
    """Give modules that are imported the names that they lack."""
    for path in REMOVED.keys() & sys.modules.keys():
        for name, function in REMOVED[path].items():
            if not hasattr(sys.modules[path], name):
                setattr(sys.modules[path], name, function)


class RemovedNamesFinder(importlib.machinery.PathFinder):
    """Finds modules as Python does; those of :data:`REMOVED` are given their names when they are imported."""

    @classmethod
    def find_spec(cls, fullname: str, *where: Any) -> importlib.machinery.ModuleSpec | None:
        spec = super().find_spec(fullname, *where) if fullname in REMOVED else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_give(module: ModuleType) -> None:
                execute(module)
                give_back()

            spec.loader.exec_module = execute_and_give
        return spec
