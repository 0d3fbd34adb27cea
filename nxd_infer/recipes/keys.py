"""Declare the keys of a recipe's sections, and read sections with them.

A section is a dataclass whose fields are made by :func:`key` or :func:`section`. Every message names the file, the
line, the key, and the nearest one or value that is valid.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from typing import Any, TypeVar

from nxd_infer.errors import RecipeError
from nxd_infer.recipes.yaml_text import KeyPath, Tree, dotted
from nxd_infer.util.options import Option
from nxd_infer.util.suggest import nearest

Section = TypeVar("Section")
LARGEST = 1 << 40
"""Whole numbers are below this."""

KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    dict: "a section",
    list: "a list",
    object: "a value",
}


def key(
    default: Any,
    help: str,
    kind: Any = str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
    also: tuple[str, ...] = (),
    unused: str = "",
    only: tuple[Any, ...] = (),
) -> Any:
    """Declare a key.

    Args:
        default: None is also what ``null`` means: as if the key were not there.
        kind: one of :data:`KINDS`, or a list's ``list[int]``.
        choices: the texts that it takes, whatever their case.
        also: other spellings of the key.
        unused: why it changes nothing here; it is accepted, and named once.
        only: the values that are supported; others are refused, with the reason ``unused``.
    """
    declared = Option(help, kind=kind, minimum=minimum, maximum=maximum, choices=choices)
    metadata = {"option": declared, "also": also, "unused": unused, "only": only}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def section(inner: type, help: str, *, also: tuple[str, ...] = (), optional: bool = False) -> Any:
    """Declare a key that holds a section; an ``optional`` one is None unless it is there."""
    metadata = {"option": Option(help, kind=inner), "also": also, "unused": "", "only": ()}
    if optional:
        return field(default=None, metadata=metadata)
    return field(default_factory=inner, metadata=metadata)


class Reader:
    """Reads sections from a tree, and collects what is given and has no effect."""

    def __init__(self, tree: Tree):
        self.tree = tree
        self.unused: dict[str, list[str]] = {}
        """The given keys without an effect, by the reason."""

    def error(self, path: KeyPath, problem: str) -> RecipeError:
        return RecipeError(f"{self.tree.where(path)}: {dotted(path)} {problem}")

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
            inner = known[name].metadata["option"].kind
            if is_section(inner):
                self.require_keys(inner, value, here)

    def read(self, kind: type[Section], values: Any, path: KeyPath = ()) -> Section:
        """Return ``kind`` with the values of its keys. Raises RecipeError."""
        known = spellings(kind)
        if not isinstance(values, Mapping):
            such = ", ".join(list(known)[:3])
            raise self.error(path, f"is a section, with keys such as {such}; got {values!r}")
        found: dict[str, Any] = {}
        for name, value in values.items():
            here, declared = (*path, name), known[name]
            if declared.name in found:
                raise self.error(here, f"is another spelling of {declared.name}, which is given too; remove one")
            found[declared.name] = self.value(declared, value, here)
        return kind(**{name: value for name, value in found.items() if value is not None})

    def value(self, declared: Field[Any], value: Any, path: KeyPath) -> Any:
        """Return a key's value, checked."""
        option: Option = declared.metadata["option"]
        if value is None:
            return None
        if is_section(option.kind):
            return self.read(option.kind, value, path)
        value = self._of_kind(option, value, path)
        only, unused = declared.metadata["only"], declared.metadata["unused"]
        if only and value not in only:
            raise self.error(path, f"= {value!r} is not supported: {unused}; the nearest is {only[0]!r}")
        if unused and not only:
            self.unused.setdefault(unused, []).append(dotted(path))
        return value

    def _of_kind(self, option: Option, value: Any, path: KeyPath) -> Any:
        kind = option.kind
        inner = getattr(kind, "__args__", (None,))[0]
        if inner is not None:
            listed = value if isinstance(value, list) else [value]
            return [self._of_kind(Option("", kind=inner, minimum=option.minimum), one, path) for one in listed]
        if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST:
            value = float(value)
        if kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)  # a name such as 2024
        wrong = kind is not object and (not isinstance(value, kind) or (kind is int and isinstance(value, bool)))
        wrong = wrong or (kind is float and math.isnan(value)) or (kind is int and abs(value) >= LARGEST)
        low, high = option.minimum, option.maximum
        outside = not wrong and ((low is not None and value < low) or (high is not None and value > high))
        if wrong or outside:
            close = f"; the nearest is {(low if low is not None and value < low else high):g}" if outside else ""
            raise self.error(path, f"must be {KINDS[kind]}{_limits(low, high)}, got {value!r}{close}")
        if option.choices and isinstance(value, str):
            matches = {one.lower(): one for one in option.choices}
            if value.lower() not in matches:
                raise self.error(path, f"= {value!r} is not known{nearest(value, option.choices)}")
            return matches[value.lower()]
        return value


def spellings(kind: type) -> dict[str, Field[Any]]:
    """Return the keys of a section, in all their spellings."""
    found: dict[str, Field[Any]] = {}
    for one in fields(kind):
        for name in (one.name, *one.metadata["also"]):
            found[name] = one
    return found


def every_key(kind: type, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Field[Any]]]:
    """Yield the keys of a section and of those inside it, in order."""
    for one in fields(kind):
        yield (*path, one.name), one
        inner = one.metadata["option"].kind
        if is_section(inner):
            yield from every_key(inner, (*path, one.name))


def table(kind: type) -> str:
    """The keys of a section as a table of Markdown: key, default, what it is."""
    rows = ["| key | default | |", "|---|---|---|"]
    for path, one in every_key(kind):
        option = one.metadata["option"]
        default = "" if is_section(option.kind) or one.default in (MISSING, None) else f"`{_typed(one.default)}`"
        also = "".join(f", also `{name}`" for name in one.metadata["also"])
        says = [option.help]
        if option.choices:
            says.append(f"one of {', '.join(option.choices)}")
        if one.metadata["unused"] and not one.metadata["only"]:
            says.append(f"no effect: {one.metadata['unused']}")
        rows.append(f"| {'· ' * (len(path) - 1)}`{path[-1]}`{also} | {default} | {'; '.join(says)} |")
    return "\n".join(rows)


def is_section(kind: Any) -> bool:
    """Return whether a key's kind is a section of keys."""
    return isinstance(kind, type) and is_dataclass(kind)


def _typed(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _limits(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" from {low:g} to {high:g}"
    return f" of at least {low:g}" if low is not None else "" if high is None else f" of at most {high:g}"
