"""What becomes here of the old packages' names that a program uses; the program is read, not run."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from nxd_infer.compat.names import OLD, ROOTS, Module
from nxd_infer.compat.uses import Unreadable, Use, uses_in
from nxd_infer.compat.views import View, is_old, our_module
from nxd_infer.util.also_called import refused_value
from nxd_infer.util.suggest import did_you_mean

STATUSES = {
    "works": "as before",
    "moved": "works, and is at another path here",
    "differs": "works, and behaves otherwise",
    "unchecked": "a star import: names that it brings are not seen",
    "not here": "can be imported, and using it fails: call what is named",
    "refused": "the call fails",
    "absent": "the import, or the attribute, fails",
    "unreadable": "the file, or the cell, cannot be read",
}
"""From good to bad: what each status means."""
STOPS = frozenset({"absent", "refused", "unreadable"})
"""Statuses that stop a program."""
GONE = {
    **dict.fromkeys(("libneuronxla", "neuronxcc", "nki"), "plain PyTorch, which a backend compiles"),
    "neuronx_distributed_inference": "`nxd-infer trace` and `nxd-infer serve`, or parallel_model_trace",
    "neuronx_distributed_training": "`nxd-infer train CONFIG`",
    "optimum.neuron": "transformers itself with nxd_infer.distributed; `nxd-infer trace` and `nxd-infer serve`",
    "torch_xla": "plain PyTorch, or the package itself where it is installed",
    "transformers_neuronx": "`nxd-infer trace MODEL --tp N` and `nxd-infer serve`",
}
"""Packages, and what to use instead of a name of theirs that is not here."""
PACKAGES = tuple(sorted({*ROOTS, *GONE}))
SKIPPED = {"__pycache__", "node_modules", "site-packages"}
"""Folders that are not looked into, like those whose name starts with a dot."""


class Verdict(NamedTuple):
    name: str
    """Up to where it could be resolved."""
    status: str
    text: str = ""
    """The other path; how it differs; what to use instead."""


@dataclass(frozen=True)
class Row:
    """The uses of one name in one file."""

    file: str
    lines: tuple[str, ...]
    """Each ``"12"``, or in a notebook ``"cell 3, 12"``."""
    status: str
    name: str
    text: str
    guarded: bool = False
    """Absent, and a ``try`` around its import expects that."""

    @property
    def stops(self) -> bool:
        return self.status in STOPS and not self.guarded


def examine(paths: Sequence[Path]) -> tuple[int, list[Row]]:
    """Return the number of files, and what becomes of the old names in them: Python and notebooks, also in folders.

    A package of an old name in one of the folders is the program's own. Raises FileNotFoundError.
    """
    files = list(dict.fromkeys(found for path in paths for found in _files(path)))
    own = {package for package in PACKAGES for file in files if file.match(f"{package}/__init__.py")}
    rows: list[Row] = []
    for file in files:
        try:
            rows += _rows(str(file), uses_in(file, set(PACKAGES) - own))
        except Unreadable as error:
            rows.append(Row(str(file), (), "unreadable", "(the file)", str(error)))
    return len(files), rows


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        for one in sorted(path.iterdir()):
            below = one.is_dir() and one.name not in SKIPPED and not one.name.startswith(".")
            if below or one.suffix in (".py", ".ipynb"):
                yield from _files(one)
    elif path.is_file():
        yield path
    else:
        raise FileNotFoundError(f"there is no {path}; give a Python file, a notebook (.ipynb) or a folder of them")


def _rows(file: str, uses: Iterable[Use]) -> list[Row]:
    together: dict[Verdict, list[Use]] = {}
    for use in uses:
        found = Verdict(use.name, "unreadable", use.problem) if use.problem else verdict(use.name)
        if found.name == use.name and found.status not in STOPS and (why := _refused(use)):
            found = Verdict(use.name, "refused", why)
        together.setdefault(found, []).append(use)
    rows = []
    for (name, status, text), some in together.items():
        lines = dict.fromkeys(str(use.line) if use.cell is None else f"cell {use.cell}, {use.line}" for use in some)
        guarded = status == "absent" and any(use.guarded for use in some)
        rows.append(Row(file, tuple(lines), status, name, text, guarded))
    return rows


@cache
def verdict(name: str) -> Verdict:
    """Return what becomes of an old dotted name; attributes of classes are looked up as well."""
    root = max((package for package in PACKAGES if f"{name}.".startswith(f"{package}.")), key=len)
    if not is_old(root):
        return Verdict(root, "absent", GONE[root])
    path, rest = root, name.split(".")[root.count(".") + 1 :]
    while rest and rest[0] not in OLD.get(path, Module()).names and is_old(f"{path}.{rest[0]}"):
        path = f"{path}.{rest.pop(0)}"
    ours, natural = our_module(path), f"{ROOTS[root]}{path.removeprefix(root)}"
    if not rest:
        return Verdict(path, "works") if ours in (None, natural) else Verdict(path, "moved", ours)
    first, *attributes = rest
    found, table = f"{path}.{first}", OLD.get(path, Module())
    if first == "*":
        return Verdict(found, "unchecked", "import the names that you use, so that they can be checked")
    if first in table.device:
        return Verdict(found, "not here", table.device[first])
    try:
        value = getattr(View(path), first)
    except AttributeError as error:
        if isinstance(error.__cause__, ModuleNotFoundError) and not str(error.__cause__.name).startswith("nxd_"):
            return Verdict(found, "works", f"with the package {error.__cause__.name}, which is not installed")
        return Verdict(found, "absent", _instead(root, path, first))
    if attributes and isinstance(value, type) and not hasattr(value, attributes[0]):
        known = did_you_mean(attributes[0], dir(value))
        return Verdict(f"{found}.{attributes[0]}", "absent", f"the class is here without it{known}")
    if first in table.differs:
        return Verdict(found, "differs", table.differs[first])
    module, _, attribute = table.names.get(first, ours or path).partition(":")
    if module in (natural, path) or module.startswith("nxd_infer.compat"):
        return Verdict(found, "works")
    return Verdict(found, "moved", f"{module}.{attribute or first}")


def _instead(root: str, path: str, name: str) -> str:
    """Say what to use instead of an absent name: the same one elsewhere, a similar one, or the package's advice."""
    for other in OLD:
        if name in OLD[other].names:
            return f"it is in {other}"
    known = did_you_mean(name, [one for one in dir(View(path)) if not one.startswith("_")])
    return GONE[root] if root in GONE and not known else f"nothing of that name{known}"


def _refused(use: Use) -> str:
    """Return why the call cannot be made, as far as the signature tells; "" if it can."""
    path, _, name = use.name.rpartition(".")
    called = getattr(View(path), name, None) if is_old(path) else None
    if called is None:
        return ""
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # it has none
        return ""
    try:
        signature.bind_partial(*[None] * use.positional, **use.keywords)
    except TypeError as error:
        return str(error)
    return refused_value(called, use.keywords)


def table() -> str:
    """Return as a table of Markdown what is not simply here: names with one text together, and what is gone."""
    found: dict[str, list[str]] = {}
    for path, module in OLD.items():
        for what, texts in (("", module.differs), ("not here: ", module.device)):
            for name, text in texts.items():
                found.setdefault(what + text, []).append(f"`{path.removeprefix('neuronx_distributed.')}.{name}`")
    for package, text in GONE.items():
        found.setdefault(text, []).append(f"`{package}.*`")
    elsewhere = sum(len(module.names) for module in OLD.values())
    lines = [f"| {', '.join(names)} | {text} |" for text, names in found.items()]
    lines.append(f"| {elsewhere} others, listed for {len(OLD)} modules | work, and are at another path here |")
    return "\n".join(["| name | here |", "|---|---|", *lines])
