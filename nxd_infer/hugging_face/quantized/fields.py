"""The field ``quantization_config`` of a ``config.json``, whose values are checked one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nxd_infer.errors import ModelConfigError

FIELD = "quantization_config"


class Fields:
    """An object in ``quantization_config``; null means absent. Every refusal names the field and its value."""

    def __init__(self, given: Mapping[str, Any], origin: str, where: str = FIELD):
        self._given = given
        self._origin = origin
        self._where = where

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def get(self, name: str, default: Any = None) -> Any:
        found = self._given.get(name)
        return default if found is None else found

    def error(self, name: str, problem: str, value: Any = None) -> ModelConfigError:
        shown = self._given.get(name) if value is None else value
        return ModelConfigError(f"{self._origin}: {self._where}.{name} = {shown!r}: {problem}")

    def one_of(self, name: str, known: Sequence[Any], default: Any = None) -> Any:
        """Return the value, which must be one of ``known``; texts in any case."""
        found = self.get(name, default)
        value = found.lower() if isinstance(found, str) else found
        if value not in known:
            problem = f"only {', '.join(map(str, known))} can be read: use the model in another form"
            raise self.error(name, problem, found)
        return value

    def size(self, name: str) -> int:
        """Return a number of elements; -1 stands for all."""
        found = self.get(name)
        if type(found) is not int or (found < 1 and found != -1):
            raise self.error(name, "expected a whole number above 0, or -1 for all inputs")
        return found

    def block(self, name: str) -> tuple[int, int]:
        """Return rows and columns of a block."""
        found = self.get(name)
        if not isinstance(found, list) or [type(one) for one in found] != [int, int] or min(found) < 1:
            raise self.error(name, "expected two whole numbers above 0, rows and columns of a block")
        return found[0], found[1]

    def inner(self, name: str) -> Fields | None:
        """Return the object that a field holds; None without one."""
        found = self.get(name)
        if found is not None and not isinstance(found, Mapping):
            raise self.error(name, "expected an object")
        return None if found is None else Fields(found, self._origin, f"{self._where}.{name}")
