"""Which names of some packages a Python file uses, and on which lines: read from its syntax, nothing is run."""

from __future__ import annotations

import ast
import json
import re
import tokenize
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

IMPORT_ERRORS = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
"""What a ``try`` catches that expects an import to fail."""
COMMAND = re.compile(r"^(\s*(?:\w+\s*=\s*)?)[!%].*")
"""A line of a notebook that is for its shell, perhaps into a variable."""


@dataclass(frozen=True)
class Use:
    name: str
    """Dotted, from the package on; ``module.*`` for a star import."""
    line: int
    cell: int | None = None
    """Of a notebook, from 1; ``line`` is counted in it."""
    guarded: bool = False
    """An import that may fail: its ``try`` catches that."""
    positional: int = 0
    """Arguments of a call, 0 if their number is not known; and those by keyword, ``...`` for what is no literal."""
    keywords: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    """Why a cell of a notebook, of which this stands for all uses, was not read."""


class Unreadable(ValueError):
    """The text is no Python of this interpreter."""


def uses_in(path: Path, packages: Collection[str]) -> list[Use]:
    """Return the uses of ``packages`` in a file ``.py`` or ``.ipynb``, in the order of the text. Raises Unreadable."""
    try:
        if path.suffix == ".ipynb":
            return _of_notebook(json.loads(path.read_text(encoding="utf-8"))["cells"], packages)
        with tokenize.open(path) as file:  # which knows of `# coding:`
            return _uses(ast.parse(file.read()), packages)
    except (SyntaxError, ValueError, RecursionError, TypeError, KeyError) as error:
        where = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else f"{error!r}"
        raise Unreadable(where) from None


def _of_notebook(cells: Any, packages: Collection[str]) -> list[Use]:
    """One program of all cells, because names live on, without shell commands. A cell that is no Python is one use."""
    body: list[ast.stmt] = []
    unread: list[Use] = []
    places: list[tuple[int, int]] = [(0, 0)]  # of each line of the whole: its cell, and its number there
    for number, cell in enumerate(cells, 1):
        text = "".join(cell["source"])
        if cell["cell_type"] != "code" or text.lstrip().startswith("%%"):
            continue
        lines = [COMMAND.sub(r"\1None", line) for line in text.splitlines()]
        try:
            tree = ast.parse("\n".join(lines))
        except SyntaxError as error:
            unread.append(Use("(the cell)", error.lineno or 1, number, problem=error.msg))
            continue
        body += ast.increment_lineno(tree, len(places) - 1).body  # pyright: ignore[reportAttributeAccessIssue]
        places += [(number, line) for line in range(1, len(lines) + 1)]
    found = _uses(ast.Module(body, []), packages)
    return [*unread, *(replace(use, cell=places[use.line][0], line=places[use.line][1]) for use in found)]


def _uses(tree: ast.Module, packages: Collection[str]) -> list[Use]:
    def known(name: str | None) -> bool:
        return any(f"{name}.".startswith(f"{package}.") for package in packages)

    def meaning(node: ast.AST) -> str | None:
        """Return the dotted name that an expression such as ``nxd.trace.x`` stands for."""
        if isinstance(node, ast.Attribute):
            base = meaning(node.value)
            return base and f"{base}.{node.attr}"
        return names.get(node.id) if isinstance(node, ast.Name) and node not in hidden else None

    def assigned(scope: ast.AST) -> dict[str, str]:
        """Return the names of assignments such as ``layers = nxd.parallel_layers.layers``."""
        nodes = [node for node in ast.walk(scope) if isinstance(node, ast.Assign)]
        found = [(target, meaning(node.value)) for node in nodes for target in node.targets]
        return {target.id: name for target, name in found if name and isinstance(target, ast.Name)}

    nodes = list(ast.walk(tree))  # what contains others comes before them
    bound = [one for node in nodes for one in _imports(node)]
    hidden: set[ast.AST] = set()
    names = {name: target for name, target, imported in reversed(bound) if known(imported)}
    names = assigned(tree) | names
    for node in nodes:  # a function's own variables of such a name are something else
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            inside = [one for one in ast.walk(node) if isinstance(one, ast.Name)]
            own = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
            own |= {one.id for one in inside if isinstance(one.ctx, ast.Store)}
            own -= {name for one in ast.walk(node) for name, _, _ in _imports(one)} | assigned(node).keys()
            hidden |= {one for one in inside if one.id in own}
    tries = [node for node in nodes if type(node).__name__ in ("Try", "TryStar") and _expects_failure(node)]
    guarded = {one for node in tries for child in node.body for one in ast.walk(child)}  # pyright: ignore
    found, parts = list[Use](), set[ast.AST]()
    for node in nodes:
        for _, _, name in _imports(node):
            if known(name):
                found.append(Use(name, node.lineno, guarded=node in guarded))  # pyright: ignore
        of = node.func if isinstance(node, ast.Call) else node
        name = None if of in parts else meaning(of)
        if name is None or not known(name):
            continue
        parts.update(ast.walk(of))
        if isinstance(node, ast.Call):
            count = 0 if any(isinstance(one, ast.Starred) for one in node.args) else len(node.args)
            keywords = {one.arg: _literal(one.value) for one in node.keywords if one.arg is not None}
            found.append(Use(name, node.lineno, positional=count, keywords=keywords))
        elif isinstance(node, ast.Attribute):
            found.append(Use(name, node.lineno))
    return sorted(found, key=lambda use: use.line)


def _expects_failure(node: Any) -> bool:
    """Return whether a ``try`` catches that an import in it fails."""
    caught = [one for handler in node.handlers for one in ast.walk(handler.type or ast.Name("Exception"))]
    return any(isinstance(one, ast.Name) and one.id in IMPORT_ERRORS for one in caught)


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, ``...`` for any other expression."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return ...


def _imports(node: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Yield for each name of an import: the name that it binds, what that stands for, and what is imported."""
    if isinstance(node, ast.Import):
        for one in node.names:
            first = one.name.partition(".")[0]
            yield one.asname or first, one.name if one.asname else first, one.name
    elif isinstance(node, ast.ImportFrom) and not node.level:
        for one in node.names:
            yield one.asname or one.name, f"{node.module}.{one.name}", f"{node.module}.{one.name}"
