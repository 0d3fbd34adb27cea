"""Which names of some packages a Python file uses, and on which lines: read from its syntax, nothing is run."""

from __future__ import annotations

import ast
import io
import json
import tokenize
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

IMPORT_ERRORS = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
"""What a ``try`` catches that expects an import to fail."""
Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Scope = (*Function, ast.ClassDef)


@dataclass(frozen=True)
class Call:
    """The arguments of one call, as far as the text tells them."""

    positional: int
    keywords: dict[str, Any]
    """The value of each, if it is a constant, else Ellipsis."""


@dataclass(frozen=True)
class Use:
    name: str
    """Dotted, from the package on; ``module.*`` for a star import."""
    line: int
    cell: int | None = None
    """Of a notebook, from 1; ``line`` is counted in it."""
    guarded: bool = False
    """An import that may fail: its ``try`` catches that."""
    call: Call | None = None


class Unreadable(ValueError):
    """The text is no Python of this interpreter."""


def uses_in(path: Path, packages: Collection[str]) -> list[Use]:
    """Return the uses of ``packages`` in a file ``.py`` or ``.ipynb``, in the order of the text. Raises Unreadable."""
    try:
        if path.suffix == ".ipynb":
            return _of_notebook(json.loads(path.read_text(encoding="utf-8")), packages)
        with tokenize.open(path) as file:  # which knows of `# coding:`
            tree = ast.parse(file.read())
    except (SyntaxError, ValueError, RecursionError) as error:
        where = f"line {error.lineno}: " if isinstance(error, SyntaxError) and error.lineno else ""
        raise Unreadable(f"{where}{getattr(error, 'msg', None) or error}") from None
    return _uses(tree, packages)


def _of_notebook(notebook: Any, packages: Collection[str]) -> list[Use]:
    """One program of all cells, because names live on; lines of the shell are left out, and what is no Python."""
    try:
        texts = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    except (TypeError, KeyError):
        raise Unreadable("it is no notebook with `cells` (format 4)") from None
    body: list[ast.stmt] = []
    starts: list[tuple[int, int]] = []  # the first line of each cell in the whole, less one; its number
    end = 0
    for number, (kind, text) in enumerate(texts, 1):
        if kind != "code" or text.lstrip().startswith("%%"):
            continue
        lines = [
            f"{line[: len(line) - len(line.lstrip())]}pass" if line.lstrip().startswith(("!", "%")) else line
            for line in io.StringIO(text).read().splitlines()
        ]
        try:
            cell = ast.parse("\n".join(lines))
        except SyntaxError:
            continue
        body += cast(ast.Module, ast.increment_lineno(cell, end)).body
        starts.append((end, number))
        end += len(lines)
    found = []
    for use in _uses(ast.Module(body, []), packages):
        start, number = max(place for place in starts if place[0] < use.line)
        found.append(Use(use.name, use.line - start, number, use.guarded, use.call))
    return found


def _uses(tree: ast.Module, packages: Collection[str]) -> list[Use]:
    reader = _Reader(packages)
    reader.enter(tree)
    reader.generic_visit(tree)
    return sorted(reader.found, key=lambda use: use.line)


class _Reader(ast.NodeVisitor):
    def __init__(self, packages: Collection[str]):
        self.packages = tuple(packages)
        self.scopes: list[tuple[ast.AST, dict[str, str | None]]] = []
        """From the module inwards: what each name stands for, None if it is none of the packages'."""
        self.guards = 0
        self.found: list[Use] = []

    def known(self, name: str) -> bool:
        return any(name == package or name.startswith(f"{package}.") for package in self.packages)

    def use(self, name: str, node: Any, call: Call | None = None, guarded: bool = False) -> None:
        self.found.append(Use(name, node.lineno, guarded=guarded, call=call))

    # --- what a name stands for --------------------------------------------------------------------------

    def meaning(self, node: ast.AST) -> str | None:
        """Return the dotted name that an expression such as ``nxd.trace.x`` stands for."""
        if isinstance(node, ast.Attribute):
            base = self.meaning(node.value)
            return None if base is None else f"{base}.{node.attr}"
        if not isinstance(node, ast.Name):
            return None
        for place, (scope, names) in enumerate(reversed(self.scopes)):
            if node.id in names and (place == 0 or not isinstance(scope, ast.ClassDef)):
                return names[node.id]
        return None

    def enter(self, scope: ast.AST) -> None:
        """Note all names of a scope before it is read: functions run after the imports that follow them."""
        names: dict[str, str | None] = {}
        self.scopes.append((scope, names))
        own = list(_own(scope))
        for node in own:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.name if alias.asname else alias.name.partition(".")[0]
                    if self.known(alias.name):
                        names.setdefault(alias.asname or name, name)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    if self.known(name := f"{node.module}.{alias.name}"):
                        names.setdefault(alias.asname or alias.name, name)
        for node in own:  # `layers = nxd.parallel_layers.layers`
            if isinstance(node, ast.Assign) and (name := self.meaning(node.value)) is not None:
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        names.setdefault(target.id, name)
        for node in own:
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                names.setdefault(node.id, None)
            elif isinstance(node, ast.arg):
                names.setdefault(node.arg, None)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node is not scope:
                names.setdefault(node.name, None)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                for alias in node.names:
                    names.setdefault(alias.asname or alias.name.partition(".")[0], None)

    # --- what is used -----------------------------------------------------------------------------------

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, Scope):
            # Decorators, defaults, bases and annotations belong to the scope around.
            inside = node.body if isinstance(node.body, list) else [node.body]
            for child in ast.iter_child_nodes(node):
                if child not in inside:
                    self.visit(child)
            self.enter(node)
            for child in inside:
                self.visit(child)
            self.scopes.pop()
        else:
            super().visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if self.known(alias.name):
                self.use(alias.name, node, guarded=self.guards > 0)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if not node.level and self.known(name := f"{node.module}.{alias.name}"):
                self.use(name, node, guarded=self.guards > 0)

    def visit_Try(self, node: ast.Try) -> None:
        guards = any(handler.type is None or _names(handler.type) & IMPORT_ERRORS for handler in node.handlers)
        self.guards += guards
        for child in node.body:
            self.visit(child)
        self.guards -= guards
        for child in [*node.handlers, *node.orelse, *node.finalbody]:
            self.visit(child)

    visit_TryStar = visit_Try

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if (name := self.meaning(node)) is not None and self.known(name):
            self.use(name, node)
        else:
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        if (name := self.meaning(node.func)) is not None and self.known(name):
            spread = any(isinstance(one, ast.Starred) for one in node.args)
            keywords = {
                one.arg: one.value.value if isinstance(one.value, ast.Constant) else ...
                for one in node.keywords
                if one.arg is not None
            }
            self.use(name, node, Call(0 if spread else len(node.args), keywords))
        else:
            self.visit(node.func)
        for child in [*node.args, *node.keywords]:
            self.visit(child)


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that a scope binds names with: not those inside the functions and classes in it."""
    waiting: list[ast.AST] = [scope.args, *_body(scope)] if isinstance(scope, Function) else list(_body(scope))
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, Scope):
            waiting += ast.iter_child_nodes(node)


def _body(scope: Any) -> Sequence[ast.AST]:
    return scope.body if isinstance(scope.body, list) else [scope.body]


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
