"""Declare the keys of a recipe's sections, and read sections with them.

A section is a dataclass whose fields are made by :func:`key`, :func:`only` or :func:`section`. Its ``UNUSED`` maps
reasons to the names of keys that are accepted with any value and change nothing. Every message names the file, the
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
"""Of numbers that have no limit of their own."""


@dataclass(frozen=True)
class Key(Option):
    """What is declared of a key."""

    also: tuple[str, ...] = ()
    """Other spellings of it."""
    field: str = ""
    """The field of Hugging Face's ``config.json`` that it sets."""
    unused: str = ""
    """Why it changes nothing here."""
    only: str = ""
    """Why no other value than the default is supported."""


def key(default: Any, help: str, kind: Any = str, **declared: Any) -> Any:
    """Declare a key; ``declared`` as in :class:`Key`. Choices are texts, whatever their case.

    A default of None is also what ``null`` means: as if the key were not there.
    """
    if kind in (int, float, list[float]):
        declared.setdefault("maximum", LARGEST)
    one = Key(default, help, kind, **declared)
    texts = [help]
    if one.also:
        texts.append(f"also {', '.join(f'`{name}`' for name in one.also)}")
    if one.choices:
        texts.append(f"one of {', '.join(one.choices)}")
    return as_field(replace(one, help="; ".join(texts)))


def only(value: Any, reason: str) -> Any:
    """Declare a key that has no other value than this."""
    return key(value, f"nothing else: {reason}", object, only=reason)


def section(inner: type, help: str, *, optional: bool = False) -> Any:
    """Declare a key that holds a section; an ``optional`` one is None unless it is there."""
    metadata = {"option": Key(None, help, inner)}
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
            if is_section(inner := known[name][1].kind):
                self.require_keys(inner, value, here)

    def read(self, kind: type[Section], values: Any, path: KeyPath = ()) -> Section:
        """Return ``kind`` with the values of its keys. Raises RecipeError."""
        known = spellings(kind)
        if not isinstance(values, Mapping):
            such = ", ".join(list(known)[:3])
            raise self.tree.error(path, f"is a section, with keys such as {such}; got {values!r}")
        read: dict[str, Any] = {}
        for name, value in values.items():
            here, (first, declared) = (*path, name), known[name]
            if first in read:
                raise self.tree.error(here, f"is another spelling of {first}, which is given too; remove one")
            if value is None or (value == "None" and "none" not in declared.choices):  # as Python writes null
                continue
            if declared.unused:
                self.unused.setdefault(declared.unused, []).append(dotted(here))
            elif is_section(declared.kind):
                read[first] = self.read(declared.kind, value, here)
            else:
                read[first] = self._value(replace(declared, default=MISSING), declared.default, value, here)
        return kind(**read)

    def _value(self, declared: Key, default: Any, value: Any, path: KeyPath) -> Any:
        if declared.only and value != default:
            raise self.tree.error(path, f"= {value!r} is not supported: {declared.only}; the nearest is {default!r}")
        if (inner := element(declared.kind)) is not None:
            listed = value if isinstance(value, list) else [value]
            return [self._value(replace(declared, kind=inner), None, one, path) for one in listed]
        kind, number = declared.kind, isinstance(value, int | float) and not isinstance(value, bool)
        if kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if kind is str and number:
            value = str(value)  # a name such as 2024
        if declared.choices and isinstance(value, str):
            matches = {one.lower(): one for one in declared.choices}
            if value.lower() not in matches:
                raise self.tree.error(path, f"= {value!r} is not known{nearest(value, declared.choices)}")
            return matches[value.lower()]
        if not declared.fits(value):
            limit = declared.outside(value) if KINDS[kind].fits(value) else None
            close = "" if limit is None else f"; the nearest is {limit:g}"
            raise self.tree.error(path, f"must be {declared.wanted}, got {value!r}{close}")
        return float(value) if kind is float else value


def spellings(kind: type) -> dict[str, tuple[str, Key]]:
    """Return the keys of a section in all their spellings, each with its first one."""
    used = {name: (first, one) for first, one in declared(kind).items() for name in (first, *one.also)}
    unused = getattr(kind, "UNUSED", {}).items()
    return used | {
        name: (name, Key(None, "", object, unused=reason)) for reason, names in unused for name in names.split()
    }
