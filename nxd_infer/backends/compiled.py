"""Files of an AOTInductor package, unpacked under names of our own, and the collectives that are left in it.

The loader takes a directory. A zip would be extracted to a temporary directory at every load, so that the file that
runs is not the one whose checksum was verified.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nxd_infer.backends.lowering import COLLECTIVES
from nxd_infer.errors import TraceError

_CODE = "model.wrapper.so"
_METADATA = "model.wrapper_metadata.json"
_OPERATORS = "model.wrapper.json"


def unpack(files: Any, directory: Path) -> None:
    """Copy what ``aot_compile`` wrote: the code, its metadata, and the description of its operator calls."""
    paths = [Path(file) for file in ([files] if isinstance(files, str) else files) if isinstance(file, str)]
    libraries = [path for path in paths if path.suffix == ".so"]
    if len(libraries) != 1:
        raise TraceError(f"the compiler wrote {len(libraries)} libraries instead of one: {[p.name for p in paths]}")
    stem = libraries[0].name.removesuffix(".so")
    directory.mkdir(parents=True, exist_ok=True)
    for path in paths:
        if path.suffix == ".so":
            shutil.copyfile(path, directory / _CODE)
            _strip(directory / _CODE)
        elif path.name == f"{stem}_metadata.json":
            shutil.copyfile(path, directory / _METADATA)
        elif path.name == f"{stem}.json":
            shutil.copyfile(path, directory / _OPERATORS)
        elif path.suffix not in (".cpp", ".json"):
            raise TraceError(f"the compiler wrote a file this package does not know: {path.name}")


def _strip(library: Path) -> None:
    """Drop the symbols that only a debugger reads: two thirds of the file. Without binutils it stays as it is."""
    strip = shutil.which("strip")
    if strip is not None:
        subprocess.run([strip, "--strip-unneeded", str(library)], capture_output=True, timeout=60, check=False)


def strays(directory: Path) -> list[str]:
    """Files that ``unpack`` did not write: the loader goes by endings, and takes code from whoever put it there."""
    return sorted({path.name for path in directory.iterdir()} - {_CODE, _METADATA, _OPERATORS})


def collectives_of_package(directory: Path, ops: Sequence[str]) -> list[str] | None:
    """The collective calls of compiled code in order, as ``operator(constant arguments)``; None when it has no list.

    A compiler may drop or move calls, so this, not the graph, says what ranks really wait for.
    """
    path = directory / _OPERATORS
    if not ops:
        return None
    if not path.exists():
        return []
    calls = []
    for node in json.loads(path.read_bytes()).get("nodes", []):
        target = node.get("target") or node.get("node", {}).get("target", "")
        namespace, _, name = str(target).removeprefix("torch.ops.").replace("::", ".").partition(".")
        name = name.split(".")[0]
        if namespace.startswith("nxd") and name in COLLECTIVES:
            inputs = node.get("node", node).get("inputs", [])
            calls.append(f"{name}({', '.join(_constants(inputs))})")
    return calls


def _constants(inputs: Iterable[Any]) -> list[str]:
    """The arguments that are not tensors, as text."""
    found = []
    for entry in inputs:
        argument = entry.get("arg", entry) if isinstance(entry, dict) else entry
        if isinstance(argument, dict):
            found += [str(value) for key, value in argument.items() if key in ("as_string", "as_int")]
    return found
