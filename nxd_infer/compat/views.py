"""Modules under old names: what importing one gives."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from types import ModuleType
from typing import Any, NoReturn

from nxd_infer.compat.names import OLD, ROOTS, Module
from nxd_infer.errors import DeviceOnlyError
from nxd_infer.util.suggest import did_you_mean


def our_path(path: str) -> str | None:
    """Return what the module with the names of the old ``path`` is called here, if there is one."""
    if path in OLD and OLD[path].ours:
        return OLD[path].ours
    root = next((root for root in ROOTS if f"{path}.".startswith(f"{root}.")), "")
    target = ROOTS.get(root)
    return None if target is None else target + path.removeprefix(root)


def our_module(path: str) -> str | None:
    """Return the name of the module here with the names of the old ``path``, or None if there is none."""
    ours = our_path(path)
    try:
        return ours if ours is not None and importlib.util.find_spec(ours) is not None else None
    except ModuleNotFoundError:
        return None


def modules_below(path: str) -> set[str]:
    """Return the names of the modules in the old ``path``."""
    ours = our_module(path)
    folders = getattr(importlib.import_module(ours), "__path__", ()) if ours else ()
    old = {one.removeprefix(f"{path}.").partition(".")[0] for one in (*OLD, *ROOTS) if one.startswith(f"{path}.")}
    return old | {module.name for module in pkgutil.iter_modules(folders)}


def is_view(path: str) -> bool:
    """Return whether the old ``path`` differs from the module here: in names of its own, or in modules below it."""
    own = OLD.get(path, Module())
    return bool(own.names or own.device) or any(
        f"{old}.".startswith(f"{path}.") for old in (*OLD, *ROOTS) if old != path
    )


class View(ModuleType):
    """An old module: the table's names, the modules below it, and every name of ours. Attributes are set on ours."""

    def __init__(self, path: str):
        super().__init__(path, f"Names of {path}, as this package has them.")
        vars(self).update(_table=OLD.get(path, Module()), _ours=our_module(path))

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return _public(self)
        if name == "__path__":
            raise AttributeError(name)  # ours, from which Python would import its modules a second time
        if name in self._table.device:
            return DeviceName(f"{self.__name__}.{name}", self._table.device[name])
        try:
            place, below = self._place(name), f"{self.__name__}.{name}"
            value = None if place is None else getattr(importlib.import_module(place[0]), place[1], None)
            if value is not None and (name in self._table.names or not isinstance(value, ModuleType)):
                return value  # also where a module below has the same name, as in our own packages
            if name not in self._table.names and is_old(below):
                return importlib.import_module(below)
            if place is None:
                raise AttributeError("this package has nothing of that name")
            return getattr(importlib.import_module(place[0]), place[1])
        except (AttributeError, ImportError) as error:  # one cause of the latter: a package that is not installed
            near = "" if name.startswith("_") else did_you_mean(name, dir(self))
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}: {error}{near}") from error

    def __setattr__(self, name: str, value: Any) -> None:
        place = self._place(name)
        if place is None or name.startswith("__") or value is sys.modules.get(f"{self.__name__}.{name}"):
            super().__setattr__(name, value)
        else:
            setattr(importlib.import_module(place[0]), place[1], value)

    def __delattr__(self, name: str) -> None:
        place = self._place(name)
        if place is None or name in vars(self):
            super().__delattr__(name)
        else:
            delattr(importlib.import_module(place[0]), place[1])

    def __dir__(self) -> list[str]:
        ours = dir(importlib.import_module(self._ours)) if self._ours else ()
        named = {*vars(self), *self._table.names, *self._table.device}
        return sorted({*named, *modules_below(self.__name__), *ours} - {"_table", "_ours"})

    def _place(self, name: str) -> tuple[str, str] | None:
        """Return the module here and the attribute in it that stand for ``name``."""
        place = self._table.names.get(name, self._ours)
        if place is None or name in self._table.device:
            return None
        module, _, attribute = place.partition(":")
        return module, attribute or name


def is_old(path: str) -> bool:
    """Return whether the old ``path`` is a module here."""
    return path in OLD or is_view(path) or our_module(path) is not None


def _public(view: View) -> list[str]:
    """Return what ``from view import *`` takes."""
    ours = importlib.import_module(view._ours) if view._ours else None
    own = getattr(ours, "__all__", None) or [name for name in vars(ours or view) if not name.startswith("_")]
    return sorted({*own, *view._table.names, *view._table.device})


class DeviceName:
    """A name that has no place here: it can be imported, and using it raises DeviceOnlyError."""

    def __init__(self, name: str, instead: str):
        self._name, self._instead = name, instead

    def __repr__(self) -> str:
        return f"<{self._name}, which is not here: {self._instead}>"

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise DeviceOnlyError(f"{self._name} cannot be used here: {self._instead}")

    __call__ = __getitem__ = __mro_entries__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse()

    def __instancecheck__(self, instance: object) -> bool:
        return False  # nothing here is one

    def __or__(self, other: Any) -> Any:
        return Any  # in an annotation

    __ror__ = __or__
