"""Files of an AOTInductor package, unpacked under our own names, and the collectives that its code calls.

The loader takes a directory. A zip would be extracted to a temporary directory at every load, and the file that
runs would not be the one whose checksum was verified.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nxd_infer.errors import TraceError
from nxd_infer.graph.passes import COLLECTIVES

_CODE = "model.wrapper.so"
_METADATA = "model.wrapper_metadata.json"
_OPERATORS = "model.wrapper.json"


def unpack(files: Any, directory: Path) -> None:
    """Copy what ``aot_compile`` wrote: the code, its metadata, and the description of its operator calls."""
    paths = _paths(files)
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


def _paths(files: Any) -> list[Path]:
    """Return the files of what ``aot_compile`` returned."""
    return [Path(file) for file in ([files] if isinstance(files, str) else files) if isinstance(file, str)]


def _strip(library: Path) -> None:
    """Remove symbols for debuggers, two thirds of the file. Without binutils the file stays as it is."""
    strip = shutil.which("strip")
    if strip is not None:
        command = [strip, "--strip-unneeded", str(library)]
        subprocess.run(command, capture_output=True, timeout=60)  # nosec B603  # a file that we have just written


def strays(directory: Path) -> list[str]:
    """Return files that ``unpack`` did not write: the loader selects files by their endings and would run any code."""
    return sorted({path.name for path in directory.iterdir()} - {_CODE, _METADATA, _OPERATORS})


def collectives_of_package(files: Any, ops: Sequence[str]) -> list[str] | None:
    """The collective calls, in order, of code that ``aot_compile`` wrote, as ``operator(constant arguments)``; None
    if it cannot have any.

    A compiler may drop or move calls, so this, not the graph, tells what ranks wait for. Operators are called
    directly, or by their number in the description of those that are called through torch's dispatcher.
    """
    if not ops:
        return None
    paths = _paths(files)
    sources = [path for path in paths if path.name.endswith(".wrapper.cpp")]
    if len(sources) != 1:
        raise TraceError(f"the compiler wrote {len(sources)} files that call operators: {[p.name for p in paths]}")
    described = sources[0].with_suffix(".json")
    nodes = json.loads(described.read_bytes()).get("nodes", []) if described in paths else []
    calls = []
    for number, name, arguments in _CALL.findall(sources[0].read_text(encoding="utf-8")):
        if number:
            node = nodes[int(number)]
            target = node.get("target") or node.get("node", {}).get("target", "")
            namespace, _, name = str(target).removeprefix("torch.ops.").replace("::", ".").partition(".")
            name = name.split(".")[0] if namespace.startswith("nxd") else ""
            constants = _constants(node.get("node", node).get("inputs", []))
        else:
            constants = [text or number for text, number in _CONSTANT.findall(_without_calls(arguments))]
        if name in COLLECTIVES:
            calls.append(f"{name}({', '.join(constants)})")
    return calls


def _without_calls(arguments: str) -> str:
    """``arguments`` without those of calls among them: a view of a tensor has numbers too."""
    while (shorter := re.sub(r"\([^()]*\)", "", arguments)) != arguments:
        arguments = shorter
    return arguments


_CALL = re.compile(
    r"\bAOTI_TORCH_ERROR_CODE_CHECK\((?:aoti_torch_proxy_executor_call_function\(proxy_executor, (\d+)\b"
    r"|aoti_torch_cpu_(\w+)\((.*))"
)
_CONSTANT = re.compile(r'(?<=, )(?:"([^"]*)"|(-?\d+)L)(?=[,)]|$)')


def _constants(inputs: Iterable[Any]) -> list[str]:
    """The arguments that are not tensors, as text."""
    found = []
    for entry in inputs:
        argument = entry.get("arg", entry) if isinstance(entry, dict) else entry
        if isinstance(argument, dict):
            found += [str(value) for key, value in argument.items() if key in ("as_string", "as_int")]
    return found
