"""What becomes here of the old packages' names that a program uses; the program is read, not run.

::

    report = examine([Path("train.py"), Path("modules")])
    for row in report.rows:
        print(row.file, row.lines, row.status, row.name, row.text)
"""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from nxd_infer.compat.names import OLD, ROOTS, Module
from nxd_infer.compat.uses import Call, Unreadable, Use, uses_in
from nxd_infer.compat.views import View, is_old, our_module
from nxd_infer.errors import NxdError
from nxd_infer.util.suggest import did_you_mean

STATUSES = {
    "works": "works",
    "moved": "works under another path",
    "differs": "works, and behaves otherwise",
    "unchecked": "not checked: a star import",
    "device": "for a Neuron device only",
    "refused": "refused: the call fails",
    "absent": "absent",
    "unreadable": "cannot be read",
}
"""From good to bad: what each status is called in a summary."""
STOPS = frozenset({"absent", "refused", "unreadable"})
"""Statuses that stop a program."""

GONE = {
    "libneuronxla": "nothing takes its place: a backend compiles what is traced",
    "neuronx_distributed_inference": "`nxd-infer trace MODEL` and `nxd-infer serve`, or "
    "nxd_infer.trace.parallel_model_trace for a model of your own",
    "neuronx_distributed_training": "`nxd-infer train CONFIG`, which reads its configurations",
    "neuronxcc": "write kernels as plain PyTorch: a backend compiles them",
    "nki": "write kernels as plain PyTorch: a backend compiles them",
    "optimum.neuron": "the model of transformers itself, with nxd_infer.distributed.Parallelizer; `nxd-infer trace` "
    "and `nxd-infer serve` to serve it",
    "torch_xla": "plain PyTorch: what is listed works, and the package itself where it is installed",
    "transformers_neuronx": "`nxd-infer trace MODEL --tp N` and `nxd-infer serve`",
}
"""Packages, and what to use instead of a name of theirs that is not here."""
PACKAGES = tuple(sorted({*ROOTS, *GONE}))
SKIPPED = {"__pycache__", "node_modules", "site-packages"}
"""Folders that are not looked into, like those whose name starts with a dot."""


class PortError(NxdError, FileNotFoundError):
    """There is no such file, or nothing of Python in it."""


@dataclass(frozen=True)
class Verdict:
    name: str
    """Up to where it could be resolved."""
    status: str
    text: str = ""
    """The other path; how it differs; what to use instead."""


@dataclass(frozen=True)
class Row(Verdict):
    file: str = ""
    lines: tuple[str, ...] = ()
    """Each ``"12"``, or in a notebook ``"cell 3, 12"``."""
    guarded: bool = False
    """Absent, and every import of it is in a ``try`` that expects that."""

    @property
    def stops(self) -> bool:
        return self.status in STOPS and not self.guarded


@dataclass(frozen=True)
class Report:
    files: int
    rows: list[Row] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """How many different names have each status."""
        seen = Counter(status for _, status in {(row.name, row.status) for row in self.rows})
        return {status: seen[status] for status in STATUSES if seen[status]}

    @property
    def stops(self) -> bool:
        """Whether the programs stop somewhere."""
        return any(row.stops for row in self.rows)


def examine(paths: Sequence[Path]) -> Report:
    """Return what becomes of each old name in Python files and notebooks, those of folders included.

    A package of an old name that lies in one of the folders is the program's own. Raises PortError for a path that is
    not there.
    """
    files = list(dict.fromkeys(found for path in paths for found in _files(path)))
    own = {package for package in PACKAGES for file in files if str(file).endswith(f"{package}/__init__.py")}
    report = Report(len(files))
    for file in files:
        try:
            report.rows.extend(_rows(str(file), uses_in(file, set(PACKAGES) - own)))
        except Unreadable as error:
            report.rows.append(Row("(the file)", "unreadable", str(error), str(file)))
    return report


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        for one in sorted(path.iterdir()):
            below = one.is_dir() and one.name not in SKIPPED and not one.name.startswith(".")
            if below or one.suffix in (".py", ".ipynb"):
                yield from _files(one)
    elif path.is_file():
        yield path
    else:
        raise PortError(f"there is no {path}; give a Python file, a notebook (.ipynb) or a folder of them")


def _rows(file: str, uses: Iterable[Use]) -> list[Row]:
    """One row for each name with the same verdict, in the order of the file."""
    together: dict[Verdict, list[Use]] = {}
    for use in uses:
        found = verdict(use.name)
        good = found.status not in STOPS and found.name == use.name
        texts = refused(use.name, use.call) if use.call and good else []
        for one in [Verdict(use.name, "refused", text) for text in texts] or [found]:
            together.setdefault(one, []).append(use)
    rows = []
    for found, some in together.items():
        lines = dict.fromkeys(str(use.line) if use.cell is None else f"cell {use.cell}, {use.line}" for use in some)
        guarded = found.status == "absent" and any(use.guarded for use in some)
        rows.append(Row(found.name, found.status, found.text, file, tuple(lines), guarded))
    return rows


@cache
def verdict(name: str) -> Verdict:
    """Return what becomes of an old dotted name; attributes of classes are looked up as well."""
    root = max((package for package in PACKAGES if f"{name}.".startswith(f"{package}.")), key=len)
    if not is_old(root):
        return Verdict(root, "absent", GONE.get(root, ""))
    path, rest = root, name.removeprefix(root).lstrip(".").split(".")
    while rest and rest[0] and rest[0] not in OLD.get(path, Module()).names and is_old(f"{path}.{rest[0]}"):
        path = f"{path}.{rest.pop(0)}"
    if not rest or not rest[0]:
        return _of_module(path)
    first, *attributes = rest
    if first == "*":
        return Verdict(f"{path}.*", "unchecked", "import the names that you use, so that they can be checked")
    found = _of_attribute(root, path, first)
    if attributes and found.status not in STOPS | {"device"}:
        value = getattr(View(path), first, None)
        if isinstance(value, type) and not hasattr(value, attributes[0]):
            known = did_you_mean(attributes[0], dir(value))
            return Verdict(f"{path}.{first}.{attributes[0]}", "absent", f"the class is here without it{known}")
    return found


def _of_module(path: str) -> Verdict:
    ours = our_module(path)
    return Verdict(path, "works") if ours in (None, _same_path(path)) else Verdict(path, "moved", ours or "")


def _of_attribute(root: str, path: str, name: str) -> Verdict:
    table, dotted = OLD.get(path, Module()), f"{path}.{name}"
    if name in table.device:
        return Verdict(dotted, "device", table.device[name])
    try:
        getattr(View(path), name)
    except AttributeError as error:
        missing = getattr(error.__cause__, "name", None)
        if isinstance(error.__cause__, ModuleNotFoundError) and not str(missing).startswith("nxd_"):
            return Verdict(dotted, "works", f"with the package {missing}, which is not installed")
        return Verdict(dotted, "absent", _instead(root, path, name))
    if name in table.differs:
        return Verdict(dotted, "differs", table.differs[name])
    place = table.names.get(name, our_module(path)) or path
    module, _, attribute = place.partition(":")
    if place.startswith("nxd_infer.compat") or module == _same_path(path) or _at(_same_path(path), name):
        return Verdict(dotted, "works")
    return Verdict(dotted, "moved", f"{module}.{attribute or name}")


def table() -> str:
    """Return as a table of Markdown the names that are not simply here: by module, names with one text together."""
    lines = []
    for path, module in OLD.items():
        for what, texts in (("differs", module.differs), ("device", module.device)):
            for text in dict.fromkeys(texts.values()):
                names = ", ".join(f"`{name}`" for name in texts if texts[name] == text)
                lines.append(f"| `{path}` | {names} | {'device only: ' if what == 'device' else ''}{text} |")
    lines += [f"| `{package}` | other names | {text} |" for package, text in GONE.items()]
    return "\n".join(["| module | name | here |", "|---|---|---|", *lines])


def _same_path(path: str) -> str:
    """Return the path here that differs in the package's name only."""
    for root, ours in ROOTS.items():
        if ours is not None and f"{path}.".startswith(f"{root}."):
            return ours + path.removeprefix(root)
    return path


def _at(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False


def _instead(root: str, path: str, name: str) -> str:
    """Say what to use instead of an absent name: the same name elsewhere, a similar one, or the package's advice."""
    for other in OLD:
        if other != path and name in OLD[other].names:
            return f"it is in {other}"
    known = did_you_mean(name, [one for one in dir(View(path)) if not one.startswith("_")])
    return f"nothing of that name{known}" if known or root not in GONE else GONE[root]


def refused(name: str, call: Call) -> list[str]:
    """Return what a call of an old name passes that ours does not take, as far as its signature tells."""
    path, _, attribute = name.rpartition(".")
    if not is_old(path):
        return []
    value: Any = getattr(View(path), attribute, None)
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = {one.kind for one in parameters}
    texts = []
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        named = {one.name for one in parameters if one.kind is not inspect.Parameter.POSITIONAL_ONLY}
        texts += [f"takes no {key}={did_you_mean(key, named)}" for key in call.keywords if key not in named]
    positional = sum(
        one.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for one in parameters
    )
    if call.positional > positional and inspect.Parameter.VAR_POSITIONAL not in kinds:
        texts.append(f"takes {positional} positional arguments, not {call.positional}")
    return texts
