"""Read YAML text as plain values, with the line of every key.

Numbers such as ``3e-4`` are floats, which PyYAML takes for text, and ``1:30:00`` is text, which it takes for a number
of base 60; a key that is given twice is an error.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nxd_infer.errors import MissingPackageError, RecipeError

KeyPath = tuple[str | int, ...]
"""The keys that lead to a value, from the top."""

FLOAT, INT, MERGE = (f"tag:yaml.org,2002:{name}" for name in ("float", "int", "merge"))
MOST_VALUES = 100_000
_FLOAT = re.compile(r"[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$|[-+]?\.\d+[eE][-+]?\d+$")


@dataclass
class Tree:
    """A file's values, and where each of them is."""

    values: dict[str, Any]
    origin: str
    """The file, as messages call it."""
    lines: dict[KeyPath, int] = field(default_factory=dict)
    commanded: set[KeyPath] = field(default_factory=set)
    """What the command line has set."""

    def where(self, key: KeyPath | str) -> str:
        """Return ``file:line`` of a key such as ``data.train_dir``, or of the nearest section around it."""
        path = tuple(key.split(".")) if isinstance(key, str) else key
        for length in range(len(path), 0, -1):
            if path[:length] in self.commanded:
                return "command line"
            if path[:length] in self.lines:
                return f"{self.origin}:{self.lines[path[:length]]}"
        return self.origin

    def error(self, key: KeyPath | str, problem: str) -> RecipeError:
        """Return the error of a key: ``file:line: key problem``."""
        return RecipeError(f"{self.where(key)}: {key if isinstance(key, str) else dotted(key)} {problem}")


def dotted(path: KeyPath) -> str:
    """Return ``("data", "prefix", 0)`` as ``data.prefix[0]``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def read_yaml(file: str | Path) -> Tree:
    """Read a file. Raises RecipeError if it cannot be read, or with the line of what is not YAML."""
    try:
        text = Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return parse_yaml(text, str(file))


def parse_yaml(text: str, origin: str) -> Tree:
    """Parse text whose top is a mapping."""
    yaml = required("yaml", "recipes are YAML files, which need PyYAML")
    tree = Tree({}, origin)
    try:
        loader = _loader(yaml)(text)
        node = loader.get_single_node()
        if node is None:
            raise RecipeError(f"{origin} is empty: a recipe has the sections trainer, data and model")
        if not isinstance(node, yaml.MappingNode):
            raise RecipeError(f"{_line(tree, node)}: a recipe is a mapping of sections")
        tree.values = _value(node, (), loader, tree)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{origin}:{mark.line + 1}" if mark else origin
        reason = str(getattr(error, "problem", None) or getattr(error, "reason", None) or error)
        raise RecipeError(f"{place}: not YAML: {reason}") from None
    except RecursionError:
        raise RecipeError(f"{origin}: it is nested too deeply, or an alias (*) or merge (<<) contains itself") from None
    return tree


def parse_value(text: str) -> Any:
    """Return the value of a piece of YAML such as ``3e-4``, ``[1, 2]`` or ``true``; text that is not YAML is text."""
    try:
        return parse_yaml(f"value: {text}", "").values["value"]
    except RecipeError:
        return text


def _line(tree: Tree, node: Any) -> str:
    return f"{tree.origin}:{node.start_mark.line + 1}"


def _value(node: Any, path: KeyPath, loader: Any, tree: Tree) -> Any:
    """Return what a node of YAML stands for; ``tree`` learns the lines of what is inside."""

    def plain(node: Any) -> Any:
        try:
            return loader.construct_object(node)
        except (ValueError, LookupError, TypeError, AttributeError) as error:  # a date or number that there is not
            raise RecipeError(f"{_line(tree, node)}: {node.value!r:.80} is not a value of YAML: {error}") from None

    def inside(part: str | int, key: Any, node: Any) -> Any:
        if len(tree.lines) >= MOST_VALUES:
            most = f"a recipe has at most {MOST_VALUES} values, those of its aliases included"
            raise RecipeError(f"{_line(tree, key)}: {most}")
        tree.lines[(*path, part)] = key.start_mark.line + 1
        return _value(node, (*path, part), loader, tree)

    if node.id == "scalar":
        return plain(node)
    if node.id == "sequence":
        return [inside(place, item, item) for place, item in enumerate(node.value)]
    first: dict[str, int] = {}
    for key in (key for key, _ in node.value if key.tag != MERGE):
        name = str(plain(key))
        if name in first:
            what = dotted((*path, name))
            raise RecipeError(f"{_line(tree, key)}: {what} is given twice, first in line {first[name]}; remove one")
        first[name] = key.start_mark.line + 1
    loader.flatten_mapping(node)  # `<<: *anchor`
    return {name: inside(name, key, value) for name, key, value in ((str(plain(k)), k, v) for k, v in node.value)}


def required(package: str, what: str) -> Any:
    """Import a package of the extra ``recipes``. Raises MissingPackageError."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError:
        raise MissingPackageError(f"{what}: pip install 'nxd-infer[recipes]'", name=package) from None


def _loader(yaml: Any) -> Any:
    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {  # without YAML 1.1's numbers of base 60
            first: [
                (tag, re.compile(f"(?!.*:){pattern.pattern}", pattern.flags) if tag in (FLOAT, INT) else pattern)
                for tag, pattern in known
            ]
            for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    Loader.add_implicit_resolver(FLOAT, _FLOAT, list("-+.0123456789"))
    return Loader
