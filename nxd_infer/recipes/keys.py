"""Declare the keys of a recipe's sections, and read sections with them.

A section is a dataclass whose fields are made by :func:`key` or :func:`section`. Every message names the file, the
line, the key, and the nearest one or value that is valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, replace
from typing import Any, TypeVar

from nxd_infer.errors import RecipeError
from nxd_infer.recipes.yaml_text import KeyPath, Tree, dotted
from nxd_infer.util.options import KINDS, Option, as_field, declared, element, is_section
from nxd_infer.util.suggest import nearest

Section = TypeVar("Section")
LARGEST = 1 << 40
"""Whole numbers are below this."""

YAML = KINDS | {bool: replace(KINDS[bool], text="true or false"), dict: replace(KINDS[dict], text="a section")}
"""What values must be, in a recipe's words."""


@dataclass(frozen=True)
class Key(Option):
    """What is declared of a key."""

    also: tuple[str, ...] = ()
    """Other spellings of it."""
    unused: str = ""
    """Why it changes nothing here; it is accepted, and named once."""
    only: tuple[Any, ...] = ()
    """The values that are supported; others are refused, with the reason ``unused``."""


def key(default: Any, help: str, kind: Any = str, **declared: Any) -> Any:
    """Declare a key; ``declared`` as in :class:`Key`. Choices are texts, whatever their case.

    A default of None is also what ``null`` means: as if the key were not there.
    """
    made = Key(default, help, kind, **declared)
    told = [help]
    if made.also:
        told.append(f"also {', '.join(f'`{name}`' for name in made.also)}")
    if made.choices:
        told.append(f"one of {', '.join(made.choices)}")
    if made.unused and not made.only:
        told.append(f"no effect: {made.unused}")
    return as_field(replace(made, help="; ".join(told)))


def section(inner: type, help: str, *, also: tuple[str, ...] = (), optional: bool = False) -> Any:
    """Declare a key that holds a section; an ``optional`` one is None unless it is there."""
    metadata = {"option": Key(None, help, inner, also=also)}
    return field(default=None, metadata=metadata) if optional else field(default_factory=inner, metadata=metadata)


class Reader:
    """Reads sections from a tree, and collects what is given and has no effect."""

    def __init__(self, tree: Tree):
        self.tree = tree
        self.unused: dict[str, list[str]] = {}
        """The given keys without an effect, by the reason."""

    def require_keys(self, kind: type, values: Any, path: KeyPath = ()) -> None:
        """Raise RecipeError for a key that is not declared, anywhere in a section: before its values are looked at."""
        if not isinstance(values, Mapping):
            return
        known = spellings(kind)
        for name, value in values.items():
            here = (*path, name)
            if name not in known:
                holder = f"{dotted(path)} has" if path else "there is"
                raise RecipeError(f"{self.tree.where(here)}: {holder} no key {name!r}{nearest(name, known)}")
            inner = known[name][1].kind
            if is_section(inner):
                self.require_keys(inner, value, here)

    def read(self, kind: type[Section], values: Any, path: KeyPath = ()) -> Section:
        """Return ``kind`` with the values of its keys. Raises RecipeError."""
        known = spellings(kind)
        if not isinstance(values, Mapping):
            such = ", ".join(list(known)[:3])
            raise self.tree.error(path, f"is a section, with keys such as {such}; got {values!r}")
        found: dict[str, Any] = {}
        for name, value in values.items():
            here, (first, declared) = (*path, name), known[name]
            if first in found:
                raise self.tree.error(here, f"is another spelling of {first}, which is given too; remove one")
            found[first] = self.value(declared, value, here)
        return kind(**{name: value for name, value in found.items() if value is not None})

    def value(self, declared: Key, value: Any, path: KeyPath) -> Any:
        """Return a key's value, checked."""
        if value is None:
            return None
        if is_section(declared.kind):
            return self.read(declared.kind, value, path)
        value = self._of_kind(replace(declared, default=MISSING), value, path)
        only, unused = declared.only, declared.unused
        if only and value not in only:
            raise self.tree.error(path, f"= {value!r} is not supported: {unused}; the nearest is {only[0]!r}")
        if unused and not only:
            self.unused.setdefault(unused, []).append(dotted(path))
        return value

    def _of_kind(self, declared: Key, value: Any, path: KeyPath) -> Any:
        kind = declared.kind
        if (inner := element(kind)) is not None:
            listed = value if isinstance(value, list) else [value]
            return [self._of_kind(replace(declared, kind=inner), one, path) for one in listed]
        if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST:
            value = float(value)
        if kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)  # a name such as 2024
        if declared.choices and isinstance(value, str):
            matches = {one.lower(): one for one in declared.choices}
            if value.lower() not in matches:
                raise self.tree.error(path, f"= {value!r} is not known{nearest(value, declared.choices)}")
            return matches[value.lower()]
        if kind is int and declared.fits(value) and abs(value) >= LARGEST:
            raise self.tree.error(path, f"must be below {LARGEST}, got {value!r}")
        if not declared.fits(value):
            limit = declared.outside(value) if KINDS[kind].fits(value) else None
            close = "" if limit is None else f"; the nearest is {limit:g}"
            raise self.tree.error(path, f"must be {declared.described(YAML)}, got {value!r}{close}")
        return value


def spellings(kind: type) -> dict[str, tuple[str, Key]]:
    """Return the keys of a section in all their spellings, each with its first one."""
    return {name: (first, one) for first, one in declared(kind).items() for name in (first, *one.also)}
