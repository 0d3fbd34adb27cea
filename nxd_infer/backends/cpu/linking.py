"""How compiled graphs call native operators: directly, by C declarations and a library that the linker finds."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nxd_infer.native import NativeLibrary
from nxd_infer.util.cpp_library import link_name

_C_TYPES = {
    "Tensor": "AtenTensorHandle",
    "Optional[Tensor]": "AtenTensorHandle*",
    "List[Tensor]": "const AtenTensorHandle*, int64_t",
    "bool": "int32_t",
    "float": "double",
    "int": "int64_t",
    "str": "const char*",
}
_C_RESULTS = {"Tensor": "AtenTensorHandle*", "List[Tensor]": "..."}


def shims(libraries: Iterable[NativeLibrary]) -> dict[Any, list[str]]:
    """C declarations of the operators that compiled graphs call directly (those with an ``NXD_SHIM`` in ``csrc/``),
    for the compiler's ``aot_inductor.custom_ops_to_c_shims``. A call through torch's dispatcher takes some
    microseconds, and a step of decoding makes a hundred. Behind the arguments of an operator without results it puts a
    null.
    """
    found: dict[Any, list[str]] = {}
    for library in libraries:
        functions = ctypes.CDLL(str(library.path))
        for name in library.ops:
            symbol = f"{library.namespace}_{name}"
            if not hasattr(functions, symbol):
                continue
            schema = library.op(name)._schema
            parameters = [_C_TYPES[str(argument.type)] for argument in schema.arguments]
            parameters += [_C_RESULTS[str(result.type)] for result in schema.returns] or ["..."]
            declared = f'AOTITorchError aoti_torch_cpu_{name}({", ".join(parameters)}) asm("{symbol}")'
            found[library.op(name)] = [declared]
    return found


@contextlib.contextmanager
def linkable(libraries: Iterable[NativeLibrary]) -> Iterator[None]:
    """Inside the block, let compilers that this process starts find the libraries by their :func:`link_name`."""
    before = os.environ.get("LIBRARY_PATH")
    with tempfile.TemporaryDirectory() as folder:
        for library in libraries:
            (Path(folder) / f"lib{link_name(library.hash)}.so").symlink_to(library.path)
        os.environ["LIBRARY_PATH"] = os.pathsep.join((folder, *filter(None, [before])))
        try:
            yield
        finally:
            if before is None:
                del os.environ["LIBRARY_PATH"]
            else:
                os.environ["LIBRARY_PATH"] = before
