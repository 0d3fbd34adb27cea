"""What a recipe's texts stand for: ``${a.b}``, ``${.sibling}``, ``${multiply:2, ${a.b}}``, ``$HOME``; and overrides.

Source: the interpolations of OmegaConf that NxD Training's files use. ``$$`` is a dollar sign.
"""

from __future__ import annotations

import json
import math
import os
import re
import sysconfig
from collections.abc import Callable, Iterable
from typing import Any

from nxd_infer.errors import RecipeError
from nxd_infer.recipes.yaml_text import KeyPath, Tree, dotted, parse_value
from nxd_infer.util.suggest import nearest

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")
_DOLLAR = "\0"
MOST_CHARACTERS = 1 << 20


def resolve(tree: Tree) -> None:
    """Replace every interpolation and environment variable in ``tree``, and ``~`` at the start of a text.

    Raises RecipeError with the key and its line for a reference to nothing, to itself, or to an unset variable.
    """
    tree.values = _Resolver(tree).value(tree.values, ())


class _Resolver:
    def __init__(self, tree: Tree):
        self.tree = tree
        self.done: dict[KeyPath, Any] = {}
        self.open: list[KeyPath] = []

    def value(self, value: Any, path: KeyPath) -> Any:
        if isinstance(value, dict):
            return {key: self.value(inner, (*path, key)) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.value(inner, (*path, place)) for place, inner in enumerate(value)]
        if not isinstance(value, str):
            return value
        if path in self.open:
            circle = " -> ".join(dotted(one) for one in (*self.open[self.open.index(path) :], path))
            raise self.tree.error(path, f"refers to itself: {circle}")
        if path not in self.done:
            self.open.append(path)
            try:
                found = self._expanded(value.replace("$$", _DOLLAR), path)
            finally:
                self.open.pop()
            self.done[path] = found.replace(_DOLLAR, "$") if isinstance(found, str) else found
        return self.done[path]

    def _expanded(self, text: str, path: KeyPath) -> Any:
        while (match := _INNERMOST.search(text)) is not None:
            found = self._reference(match[1].strip(), path)
            if match[0] == text:  # the whole text: its type is kept
                return self._expanded(found, path) if isinstance(found, str) and "$" in found else found
            text = text[: match.start()] + _as_text(found) + text[match.end() :]
            if len(text) > MOST_CHARACTERS:
                raise self.tree.error(path, f"has more than {MOST_CHARACTERS} characters by its references")
        if "${" in text:
            raise self.tree.error(path, f"has a '${{' without its '}}': {text!r}")
        text = _VARIABLE.sub(lambda variable: self._variable(variable[1], path), text)
        return os.path.expanduser(text) if text.startswith("~") and "\0" not in text else text

    def _reference(self, inside: str, path: KeyPath) -> Any:
        name, colon, arguments = inside.partition(":")
        if colon:
            return self._function(name.strip(), [one.strip() for one in arguments.split(",")], path)
        name = inside.lstrip(".")  # ``.x`` is beside the key, ``..x`` beside its section
        dots = len(inside) - len(name)
        target: KeyPath = (*(path[: len(path) - dots] if dots else ()), *name.split("."))
        value: Any = self.tree.values
        for number, part in enumerate(target):
            if isinstance(value, list) and str(part).isdecimal() and int(part) < len(value):
                value = value[int(part)]
            elif isinstance(value, dict) and part in value:
                value = value[part]
            elif (variable := _environment(inside)) is not None:
                return variable
            else:
                known = [dotted((*target[:number], key)) for key in value] if isinstance(value, dict) else []
                raise self.tree.error(path, f"refers to {inside!r}, which is not there{nearest(dotted(target), known)}")
        return self.value(value, target)

    def _function(self, name: str, arguments: list[str], path: KeyPath) -> Any:
        if name in ("oc.env", "env"):
            return self._variable(arguments[0], path, *arguments[1:2])
        if name == "stdlib":  # a file that comes with Python
            return os.path.join(sysconfig.get_path("stdlib"), *arguments)
        if name not in FUNCTIONS:
            known = (*FUNCTIONS, "oc.env", "stdlib")
            raise self.tree.error(path, f"calls {name!r}, which is not a function of recipes{nearest(name, known)}")
        numbers = [parse_value(argument) for argument in arguments]
        if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
            raise self.tree.error(path, f"{name} takes numbers, got {arguments}")
        try:
            found = FUNCTIONS[name](numbers)
            return int(found) if name == "divide" and found == int(found) else found
        except ZeroDivisionError:
            raise self.tree.error(path, f"{name} divides by zero") from None
        except (ValueError, OverflowError):
            raise self.tree.error(path, f"{name} of {arguments} is not a number") from None

    def _variable(self, name: str, path: KeyPath, default: str | None = None) -> str:
        found = default if (variable := _environment(name)) is None else variable
        if found is None:
            problem = f"needs the environment variable {name}, which is not set ($$ is a plain dollar)"
            raise self.tree.error(path, problem)
        return found


def _environment(name: str) -> str | None:
    try:
        return os.environ.get(name)
    except ValueError:  # not a name that a variable can have
        return None


FUNCTIONS: dict[str, Callable[[list[Any]], Any]] = {
    "multiply": math.prod,
    "add": sum,
    "divide": lambda numbers: numbers[0] / math.prod(numbers[1:]),
}


def _as_text(value: Any) -> str:
    """Return a value as YAML writes it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def override(tree: Tree, overrides: Iterable[str]) -> None:
    """Set ``key=value`` in a tree, by dotted keys; ``+key=value`` is the same, ``~key`` removes a key.

    Raises RecipeError for what is not of this form.
    """
    for text in overrides:
        name, equals, value = text.partition("=")
        name = name.lstrip("+")
        removes = name.startswith("~")
        path: KeyPath = tuple(name.removeprefix("~").split("."))
        if not all(path) or not (equals or removes):
            raise RecipeError(
                f"command line: {text!r} is not an override: write key=value, such as trainer.max_steps=10"
            )
        holder: Any = tree.values
        for number, part in enumerate(path[:-1]):
            if holder.get(part) is None:
                holder[part] = {}
            holder = holder[part]
            if not isinstance(holder, dict):
                problem = f"{dotted(path[: number + 1])} is not a section but {holder!r}"
                raise RecipeError(f"command line: {text!r}: {problem}")
        if removes:
            holder.pop(path[-1], None)
        else:
            holder[path[-1]] = parse_value(value)
            tree.commanded.add(path)
