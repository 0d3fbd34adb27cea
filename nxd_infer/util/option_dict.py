"""Dictionaries whose keys are declared: each with a default, what a value must be, and a line of documentation.

::

    class InitOptions(Options):
        name = "model_init_config"
        meta_device_init: bool = option(False, "build without memory", a_boolean)

    InitOptions({"meta_device_init": 1})            # ParallelConfigError, and for a key that is not declared
    InitOptions()["meta_device_init"] == InitOptions().meta_device_init == False

A value is checked when it is set, so what holds one need not be checked again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, ClassVar

from nxd_infer.errors import ParallelConfigError
from nxd_infer.util.suggest import did_you_mean

Check = Callable[[str, Any], Any]
"""``(what a message calls it, value)`` to the value that is kept. Raises ParallelConfigError."""


class Option:
    """What is declared of a key; as an attribute of an :class:`Options` it is the value."""

    name = ""
    inner: type[Options] | None = None
    """Of a value that is a dictionary of options itself."""

    def __init__(self, default: Any, says: str, check: Check, shown: str | None):
        self.default, self.says, self.check = default, says, check
        self.shown = repr(default) if shown is None else shown

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, options: Options | None, owner: type | None = None) -> Any:
        return self if options is None else options.get(self.name, self.default)


def option(default: Any, says: str, check: Check, *, shown: str | None = None) -> Any:
    """Declare a key; ``shown`` is its default in documents, where it is not ``default`` itself."""
    return Option(default, says, check, shown)


def section(inner: type[Options], says: str = "") -> Any:
    """Declare a key whose value is a dictionary of ``inner``'s options."""
    declared = Option(None, says, lambda _, value: inner(value), "")
    declared.inner = inner
    return declared


class Options(dict[str, Any]):
    """The base of such a dictionary, made of a mapping, which is left alone, or of None."""

    name: ClassVar[str] = ""
    """What a message calls it."""
    inner: ClassVar[bool] = True
    """Whether messages call a value ``name['key']``, and not just ``key``."""
    only_given: ClassVar[bool] = False
    """Whether keys that are not given stay away."""

    def __init__(self, given: Any = None):
        super().__init__()
        given = {} if given is None else given
        if not isinstance(given, Mapping):
            raise ParallelConfigError(f"{self.name} must be a dict or None, got {type(given).__name__}")
        for key in given:
            self._declared(key)
        for key, declared in self.declared().items():
            if key in given or not self.only_given:
                self[key] = given.get(key, declared.default)

    @classmethod
    def declared(cls) -> dict[str, Option]:
        """What is declared, by key, in order."""
        return {key: value for key, value in vars(cls).items() if isinstance(value, Option)}

    @classmethod
    def _declared(cls, key: Any) -> Option:
        declared = cls.declared()
        if key not in declared:
            hint = did_you_mean(str(key), declared) or f"; known are {', '.join(declared)}"
            raise ParallelConfigError(f"{cls.name} has no key {key!r}{hint}")
        return declared[key]

    def __setitem__(self, key: str, value: Any) -> None:
        what = f"{self.name}[{key!r}]" if self.inner else key
        value = self._declared(key).check(what, value)
        self.agree({**self, key: value})
        super().__setitem__(key, value)

    def agree(self, values: Mapping[str, Any]) -> None:
        """Raise ParallelConfigError where values fit each for itself and not together. Some may be missing yet."""

    update = MutableMapping.update  # dict's own pass __setitem__ by
    setdefault = MutableMapping.setdefault

    def __ior__(self, other: Any) -> Options:
        self.update(other)
        return self
