"""Imports point down only, and ``import nxd_infer`` loads torch and nothing optional."""

from __future__ import annotations

import ast
import functools
import graphlib
import json
import re
import subprocess
import sys
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


def sources() -> list[tuple[str, Path]]:
    """(dotted module name, file) of every module of the three packages."""
    found = []
    for package, folder in ROOTS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = list(path.relative_to(folder.parent).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            found.append((".".join(parts), path))
        assert folder.is_dir(), package
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


def inside_functions(name: str, path: Path) -> dict[int, str]:
    """The imports of our own packages inside functions: the source of each, by line."""
    text = path.read_text()
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    nodes = [node for function in functions for node in ast.walk(function) if imported_by(node, name, path)]
    lines = text.splitlines()
    return {node.lineno: "\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in nodes}  # type: ignore[attr-defined]


@functools.cache
def modules() -> frozenset[str]:
    return frozenset(name for name, _ in sources())


def module_of(target: str) -> str:
    """The module that holds what is imported by this name."""
    return target if target in modules() else target.rpartition(".")[0]


def test_every_module_stands_on_a_floor():
    """But the package itself, whose names stand for all of them."""
    homeless = [name for name, _ in sources() if name != "nxd_infer" and floor_of(name) is None]
    assert homeless == []


def test_imports_point_down():
    climbing = []
    for name, path in sources():
        here = floor_of(name)
        if here is None:
            continue
        for target in imported(name, path):
            there = floor_of(target)
            if there is not None and there < here:
                climbing.append(f"{name} imports {target}")
    assert climbing == []


def test_no_two_modules_reach_each_other():
    sorter = graphlib.TopologicalSorter({name: imported(name, path) for name, path in sources()})
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        pytest.fail("a circle of imports: " + " <- ".join(error.args[1]))


def test_few_imports_of_our_own_stand_inside_functions():
    """And each says, on its line, which optional or slow package it waits for; ``nxd_infer.util.lazy`` does without."""
    found = {
        f"{name}:{line}": source for name, path in sources() for line, source in inside_functions(name, path).items()
    }
    assert len(found) < 15
    assert [place for place, source in found.items() if not re.search(r"#.*\b(slow|optional): \S", source)] == []


def loaded_by(statement: str) -> set[str]:
    code = f"import sys, json\n{statement}\nprint(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_library_loads_nothing_optional():
    """Torch is the only dependency it may need, and that only when a submodule is touched."""
    modules = loaded_by("import nxd_infer; nxd_infer.errors")
    optional = {
        "fastapi", "uvicorn", "transformers", "tokenizers", "typer", "rich", "pydantic", "torch_xla",
        "torch_neuronx", "lightning", "prometheus_client", "jinja2", "nxd_server", "nxd_models",
    }  # fmt: skip
    assert modules & (optional | {"torch"}) == set()
    with_layers = loaded_by("import nxd_infer; nxd_infer.parallel_layers.ColumnParallelLinear")
    assert "torch" in with_layers
    assert with_layers & optional == set()


def test_what_starts_ranks_and_serves_tokens_needs_no_torch():
    """Its import takes a second, which the ranks take as well: they would begin theirs only afterwards."""
    modules = loaded_by(
        "import nxd_infer.runtime.rank_model, nxd_infer.runtime.rank_process.main, nxd_infer.cli.main\n"
        "import nxd_infer.cli.serve\n"
        "import nxd_server.app.run, nxd_server.app.start_model, nxd_server.http.server\n"
        "import nxd_server.engine.generation_engine, nxd_server.text.chat_template, nxd_server.text.tokenizer"
    )
    assert {"nxd_server", "fastapi", "numpy"} <= modules
    assert "torch" not in modules


def test_every_submodule_is_reachable_by_attribute():
    code = "import nxd_infer as n; [getattr(n, s) for s in n.__all__]; print('ok')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "ok", done.stderr


def test_no_submodule_takes_a_function_of_its_package_away():
    """Importing ``package.name`` sets the attribute ``name`` of the package, whatever it was before."""
    modules = {name for name, _ in sources()}
    code = (
        "import importlib, sys\n"
        f"modules = {sorted(modules)!r}\n"
        f"for package in {sorted(name for name, path in sources() if path.name == '__init__.py')!r}:\n"
        "    for name in getattr(importlib.import_module(package), '__all__', ()):\n"
        "        try:\n"
        "            value = getattr(sys.modules[package], name)\n"
        "        except ModuleNotFoundError as error:\n"
        "            if error.name != 'torch_xla':\n"
        "                raise\n"
        "            continue  # a module of the package, which needs it\n"
        "        if f'{package}.{name}' in modules:\n"
        "            importlib.import_module(f'{package}.{name}')\n"
        "            if getattr(sys.modules[package], name) is not value:\n"
        "                print(f'{package}.{name}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr or done.stdout
