"""Read YAML text as plain values, with the line of every key.

Numbers such as ``3e-4`` are floats, which PyYAML takes for text, and ``1:30:00`` is text, which it takes for a number
of base 60; a key that is given twice is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nxd_infer.errors import MissingPackageError, RecipeError

KeyPath = tuple[str | int, ...]
"""The keys that lead to a value, from the top."""

MERGE = "tag:yaml.org,2002:merge"
FLOAT, INT = "tag:yaml.org,2002:float", "tag:yaml.org,2002:int"
MOST_VALUES = 100_000
DEEPEST = 64
"""Levels of a recipe; PyYAML's own bound is the interpreter's stack, which differs by caller."""
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

    def where(self, path: KeyPath) -> str:
        """Return ``file:line`` of a key, or of the nearest section around it that the file has."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.commanded:
                return "command line"
            if path[:length] in self.lines:
                return f"{self.origin}:{self.lines[path[:length]]}"
        return self.origin

    def error(self, path: KeyPath, problem: str) -> RecipeError:
        """Return the error of a key: ``file:line: key problem``."""
        return RecipeError(f"{self.where(path)}: {dotted(path)} {problem}")


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
    yaml = _yaml()
    tree = Tree({}, origin)
    loader = None
    try:
        loader = _loader(yaml)(text)
        node = loader.get_single_node()
        if node is None:
            raise RecipeError(f"{origin} is empty: a recipe has the sections trainer, data and model")
        if not isinstance(node, yaml.MappingNode):
            raise RecipeError(f"{origin}:{node.start_mark.line + 1}: a recipe is a mapping of sections")
        tree.values = _Converter(yaml, loader, tree).convert(node, ())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{origin}:{mark.line + 1}" if mark else origin
        said = str(getattr(error, "problem", None) or getattr(error, "reason", None) or error)
        raise RecipeError(f"{place}: not YAML: {said}") from None
    except RecursionError:  # PyYAML follows merges (<<) by itself
        problem = "too many merges (<<) lead to each other; write keys out"
        raise RecipeError(f"{origin}: not YAML that is read: {problem}") from None
    finally:
        if loader is not None:
            loader.dispose()
    return tree


def parse_value(text: str) -> Any:
    """Return the value of a piece of YAML such as ``3e-4``, ``[1, 2]`` or ``true``; text that is not YAML is text."""
    try:
        return parse_yaml(f"value: {text}", "").values["value"]
    except RecipeError:
        return text


class _Converter:
    """Turns YAML's nodes into values, and notes their lines."""

    def __init__(self, yaml: Any, loader: Any, tree: Tree):
        self.yaml, self.loader, self.tree = yaml, loader, tree
        self.open: list[Any] = []

    def convert(self, node: Any, path: KeyPath) -> Any:
        if node in self.open:
            line = node.start_mark.line + 1
            raise RecipeError(f"{self.tree.origin}:{line}: {dotted(path)} contains itself through an alias")
        if len(self.open) >= DEEPEST:  # by aliases: their nodes were counted where they stand
            where = f"{self.tree.origin}:{node.start_mark.line + 1}"
            problem = f"it is nested more than {DEEPEST} levels deep; flatten it"
            raise RecipeError(f"{where}: not YAML that is read: {problem}")
        self.open.append(node)
        try:
            if isinstance(node, self.yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, self.yaml.SequenceNode):
                return [self._at(item, (*path, place)) for place, item in enumerate(node.value)]
            return self._scalar(node)
        finally:
            self.open.pop()

    def _scalar(self, node: Any) -> Any:
        try:
            return self.loader.construct_object(node)
        except (ValueError, LookupError, TypeError, AttributeError) as error:  # a date or number that there is not
            where = f"{self.tree.origin}:{node.start_mark.line + 1}"
            raise RecipeError(f"{where}: {node.value!r:.80} is not a value of YAML: {error}") from None

    def _at(self, node: Any, path: KeyPath, line: int | None = None) -> Any:
        if len(self.tree.lines) >= MOST_VALUES:
            where = f"{self.tree.origin}:{node.start_mark.line + 1}"
            raise RecipeError(f"{where}: a recipe has at most {MOST_VALUES} values, those of its aliases included")
        self.tree.lines[path] = (node.start_mark.line if line is None else line) + 1
        return self.convert(node, path)

    def _mapping(self, node: Any, path: KeyPath) -> dict[str, Any]:
        first: dict[str, int] = {}
        for key, _ in node.value:
            if key.tag == MERGE:
                continue
            name, line = str(self._scalar(key)), key.start_mark.line + 1
            if name in first:
                where, what = f"{self.tree.origin}:{line}", dotted((*path, name))
                raise RecipeError(f"{where}: {what} is given twice, first in line {first[name]}; remove one")
            first[name] = line
        self.loader.flatten_mapping(node)  # `<<: *anchor`
        found: dict[str, Any] = {}
        for key, value in node.value:
            name = str(self._scalar(key))
            found[name] = self._at(value, (*path, name), key.start_mark.line)
        return found


def _yaml() -> Any:
    try:
        import yaml
    except ModuleNotFoundError:
        raise MissingPackageError(
            "recipes are YAML files, which need PyYAML: pip install 'nxd-infer[recipes]'", name="yaml"
        ) from None
    return yaml


def _decimal(pattern: re.Pattern[str]) -> re.Pattern[str]:
    """Return what a number looks like, without YAML 1.1's of base 60."""
    return re.compile(f"(?!.*:){pattern.pattern}", pattern.flags)


def _loader(yaml: Any) -> Any:
    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {
            key: [(tag, _decimal(pattern) if tag in (FLOAT, INT) else pattern) for tag, pattern in found]
            for key, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }
        level = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.level += 1
            if self.level > DEEPEST:
                problem = f"it is nested more than {DEEPEST} levels deep; flatten it"
                raise yaml.composer.ComposerError(None, None, problem, self.peek_event().start_mark)
            node = super().compose_node(parent, index)
            self.level -= 1
            return node

    Loader.add_implicit_resolver(FLOAT, _FLOAT, list("-+.0123456789"))
    return Loader
