"""Imports point down only, and ``import nxd_infer`` loads torch and nothing optional."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Floors from the top down; a package may import from its own floor and from any floor below.
FLOORS: list[list[str]] = [
    ["nxd_infer.cli", "nxd_infer.__main__"],
    ["nxd_server"],
    ["nxd_infer.recipes", "nxd_infer.lightning", "nxd_infer.compat.torch_neuronx", "nxd_infer.testing"],
    ["nxd_infer.trace", "nxd_infer.pipeline", "nxd_infer.trainer", "nxd_infer.distributed"],
    ["nxd_models", "nxd_infer.backends", "nxd_infer.optimizer"],
    ["nxd_infer.modules"],
    ["nxd_infer.parallel_layers"],
    ["nxd_infer.layout", "nxd_infer.comm", "nxd_infer.native", "nxd_infer.ops", "nxd_infer.parallel_state"],
    [
        "nxd_infer.beneath",
        "nxd_infer.open_beneath",
        "nxd_infer.context",
        "nxd_infer.dtypes",
        "nxd_infer.errors",
        "nxd_infer.cache",
        "nxd_infer.children",
        "nxd_infer.compat",
        "nxd_infer.control_groups",
        "nxd_infer.memory",
        "nxd_infer.processors",
        "nxd_infer.reading",
        "nxd_infer.suggest",
        "nxd_infer.units",
    ],
]
# Pure data that two floors share.
SHARED = {"nxd_infer.trace.manifest"}
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


def imported(name: str, path: Path) -> set[str]:
    """Every module that the file imports, at any depth of nesting, outside ``if TYPE_CHECKING``."""
    modules: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            modules.update(f"{base}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return {m for m in modules if m.split(".")[0] in ROOTS}


@pytest.mark.check
def test_every_module_stands_on_a_floor():
    homeless = [name for name, _ in sources() if name != "nxd_infer" and floor_of(name) is None]
    assert homeless == []


@pytest.mark.check
def test_imports_point_down():
    climbing = []
    for name, path in sources():
        here = floor_of(name)
        if here is None:
            continue
        for target in imported(name, path):
            if any(target == shared or target.startswith(shared + ".") for shared in SHARED):
                continue
            there = floor_of(target)
            if there is not None and there < here:
                climbing.append(f"{name} imports {target}")
    assert climbing == []


@pytest.mark.check
def test_packages_of_one_floor_form_no_circle():
    edges: dict[str, set[str]] = {}

    def package_of(module: str) -> str | None:
        for packages in FLOORS:
            for package in packages:
                if module == package or module.startswith(package + "."):
                    return package
        return None

    for name, path in sources():
        source = package_of(name)
        for target in imported(name, path):
            if target in SHARED or any(target.startswith(s + ".") for s in SHARED):
                continue
            other = package_of(target)
            if source and other and source != other:
                edges.setdefault(source, set()).add(other)

    def reaches(start: str, goal: str, seen: frozenset[str] = frozenset()) -> bool:
        return any(
            nxt == goal or (nxt not in seen and reaches(nxt, goal, seen | {nxt})) for nxt in edges.get(start, ())
        )

    assert [package for package in edges if reaches(package, package)] == []


def loaded_by(statement: str) -> set[str]:
    code = f"import sys, json\n{statement}\nprint(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.check
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


@pytest.mark.check
def test_what_starts_ranks_and_serves_tokens_needs_no_torch():
    """Its import takes a second, which the ranks take as well: they would begin theirs only afterwards."""
    modules = loaded_by(
        "import nxd_infer.trace.rank_model, nxd_infer.trace.worker, nxd_infer.cli.main, nxd_infer.cli.serve\n"
        "import nxd_server.run, nxd_server.bounded, nxd_server.http.app, nxd_server.engine.engine\n"
        "import nxd_server.text.chat, nxd_server.text.tokenizer"
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
        "        value = getattr(sys.modules[package], name)\n"
        "        if f'{package}.{name}' in modules:\n"
        "            importlib.import_module(f'{package}.{name}')\n"
        "            if getattr(sys.modules[package], name) is not value:\n"
        "                print(f'{package}.{name}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr or done.stdout
