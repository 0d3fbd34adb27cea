"""Dictionaries whose keys are options, declared as the fields of a dataclass are (:mod:`nxd_infer.util.options`).

::

    class InitOptions(OptionDict):
        name = "model_init_config"
        meta_device_init: bool = option(False, "build without memory", bool)

    InitOptions({"meta_device_init": 1})            # ParallelConfigError, and for a key that is not declared
    InitOptions()["meta_device_init"] == InitOptions().meta_device_init == False

A value is checked when it is set, so what holds one need not be checked again.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar

from nxd_infer.errors import ParallelConfigError
from nxd_infer.util.options import Option, declared, is_section
from nxd_infer.util.suggest import did_you_mean


class OptionDict(dict[str, Any]):
    """The base of such a dictionary, made of a mapping, which is left alone, or of None."""

    name: ClassVar[str] = ""
    """What a message calls it."""
    inner: ClassVar[bool] = True
    """Whether messages call a value ``name['key']``, and not just ``key``."""
    only_given: ClassVar[bool] = False
    """Whether keys that are not given stay away."""

    def __init_subclass__(cls) -> None:
        dataclass(init=False, repr=False, eq=False)(cls)
        for key, one in declared(cls).items():
            setattr(cls, key, property(lambda self, key=key, default=one.default: self.get(key, default)))

    def __init__(self, given: Any = None):
        super().__init__()
        given = {} if given is None else given
        if not isinstance(given, Mapping):
            raise ParallelConfigError(f"{self.name} must be a dict or None, got {type(given).__name__}")
        for key in given:
            self._declared(key)
        for key, one in declared(type(self)).items():
            if key in given or not self.only_given:
                self[key] = given.get(key, one.default)

    @classmethod
    def _declared(cls, key: Any) -> Option:
        known = declared(cls)
        if key not in known:
            hint = did_you_mean(str(key), known) or f"; known are {', '.join(known)}"
            raise ParallelConfigError(f"{cls.name} has no key {key!r}{hint}")
        return known[key]

    def __setitem__(self, key: str, value: Any) -> None:
        one = self._declared(key)
        what = f"{self.name}[{key!r}]" if self.inner else key
        value = one.kind(value) if is_section(one.kind) else one.checked(what, value, ParallelConfigError)
        self.agree({**self, key: value})
        super().__setitem__(key, value)

    def agree(self, values: Mapping[str, Any]) -> None:
        """Raise ParallelConfigError where values fit each for itself and not together. Some may be missing yet."""

    update = MutableMapping.update  # dict's own pass __setitem__ by
    setdefault = MutableMapping.setdefault

    def __ior__(self, other: Any) -> OptionDict:
        self.update(other)
        return self
