"""Imports point down only."""

from __future__ import annotations

import ast
import functools
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# Floors from the top down; a module may import from its own floor and from any floor below.
FLOORS: list[list[str]] = [
    ["nxd_infer.cli", "nxd_infer.__main__"],
    ["nxd_infer.recipes", "nxd_infer.verify"],
    ["nxd_server"],
    ["nxd_infer.testing", "nxd_infer.compat.torch_neuronx", "nxd_models.generic"],
    ["nxd_infer.trace", "nxd_infer.lightning"],
    ["nxd_infer.distributed", "nxd_infer.runtime", "nxd_infer.trainer"],
    ["nxd_models", "nxd_infer.backends", "nxd_infer.checkpoint"],
    ["nxd_infer.graph", "nxd_infer.optimizer", "nxd_infer.pipeline"],
    ["nxd_infer.artifact", "nxd_infer.modules"],
    ["nxd_infer.parallel_layers"],
    ["nxd_infer.parallel_state"],
    ["nxd_infer.layout", "nxd_infer.native"],
    ["nxd_infer.comm", "nxd_infer.ops"],
    ["nxd_infer.context", "nxd_infer.compat"],
    ["nxd_infer.util"],
    ["nxd_infer.errors"],
]
ROOTS = {
    "nxd_infer": ROOT / "nxd_infer",
    "nxd_server": ROOT / "server/nxd_server",
    "nxd_models": ROOT / "models/nxd_models",
}


@functools.cache
def sources() -> list[tuple[str, Path]]:
    """(dotted module name, file) of every module of the three packages."""
    found = []
    for folder in ROOTS.values():
        for path in sorted(folder.rglob("*.py")):
            parts = list(path.relative_to(folder.parent).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            found.append((".".join(parts), path))
    return found


def floor_of(module: str) -> int | None:
    for number, packages in enumerate(FLOORS):
        if any(module == package or module.startswith(package + ".") for package in packages):
            return number
    return None


@functools.cache
def imported(name: str, path: Path) -> set[str]:
    """Every module of ours that the file imports: inside functions and ``if TYPE_CHECKING``, too."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {target for node in nodes for target in imported_by(node, name, path)} - {name}


def imported_by(node: ast.AST, name: str, path: Path) -> set[str]:
    """The modules of ours that this statement imports; empty unless it is an import."""
    found: set[str] = set()
    if isinstance(node, ast.Import):
        found.update(alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
            base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
        found.update(f"{base}.{alias.name}" for alias in node.names)
    return {module_of(target) for target in found if target.split(".")[0] in ROOTS}


@functools.cache
def modules() -> frozenset[str]:
    return frozenset(name for name, _ in sources())


def module_of(target: str) -> str:
    """The module that holds what is imported by this name."""
    return target if target in modules() else target.rpartition(".")[0]


def test_every_module_stands_on_a_floor_and_its_imports_point_down():
    """But the package itself, whose names stand for all of them."""
    homeless, climbing = [], []
    for name, path in sources():
        here = floor_of(name)
        if here is None:
            homeless.append(name)
            continue
        for target in imported(name, path):
            there = floor_of(target)
            if there is not None and there < here:
                climbing.append(f"{name} imports {target}")
    assert (homeless, climbing) == (["nxd_infer"], [])


def test_no_two_modules_reach_each_other():
    sorter = graphlib.TopologicalSorter({name: imported(name, path) for name, path in sources()})
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        pytest.fail("a circle of imports: " + " <- ".join(error.args[1]))
