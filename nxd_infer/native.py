"""The native operators: built once with the C++ compiler, cached by content, registered once per process.

``torch.ops.nxd_<hash8>.*`` are the CPU operators of ``csrc/operators``. The namespace contains a hash of the sources
and build flags, so different libraries (for example of two artifacts) can live in one process, and copies of a library
count as one. They use torch's stable ABI and choose the instruction set at run time, so the file does not depend on the
machine it was built on. Building needs a compiler and torch's headers; loading a built file, such as a wheel's, needs
neither.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nxd_infer import ops as _ops
from nxd_infer.comm import ops as _comm_ops
from nxd_infer.errors import ArtifactCorruptError, ArtifactError, ArtifactVersionError, BackendUnavailableError
from nxd_infer.util.cpp_library import CppLibrary, find_compiler, is_whole, no_compiler
from nxd_infer.util.machine import processors

SOURCES = Path(__file__).parent / "csrc/operators"

_IDENTITY = re.compile(rb"NXD-NATIVE-LIBRARY:([0-9a-f]{16}):END")
_OTHER_VERSION = re.compile(r"undefined symbol|version `[^']*' not found|cannot open shared object file")
"""In the loader's messages: what the library was linked with is older here, or missing."""
_lock = threading.RLock()
_loaded: dict[str, NativeLibrary] = {}
_failure: str | None = None


@dataclass(frozen=True)
class Availability:
    """Whether something can be used here, and if not, why."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True)
class NativeLibrary:
    """A library whose operators are registered in this process as ``torch.ops.<namespace>``."""

    hash: str
    path: Path
    namespace: str
    ops: tuple[str, ...]

    def op(self, name: str) -> Any:
        """Return the overload ``torch.ops.<namespace>.<name>.default``; KeyError lists the existing operators."""
        if name not in self.ops:
            raise KeyError(f"native library {self.hash} has no operator {name!r}; it has {list(self.ops)}")
        return getattr(getattr(torch.ops, self.namespace), name).default

    def cpu_level(self) -> str:
        """Return the instruction set that the kernels use here: portable, avx2, avx512, avx512_bf16 or amx_bf16.

        Raises BackendUnavailableError if NXD_INFER_CPU_LEVEL names another one.
        """
        level = ctypes.CDLL(str(self.path)).nxd_cpu_level
        level.restype = ctypes.c_char_p
        found = level().decode()
        if found.startswith("nxd: "):
            raise BackendUnavailableError(found.removeprefix("nxd: "))
        return found

    def engage_crew(self, threads: int, cores: Sequence[int] = ()) -> None:
        """Replace torch's threads in the operators by a crew of ``threads`` threads: the calling thread and new ones
        that poll for work (``csrc/operators/machine/crew.h``). 1 goes back to torch's threads.

        ``cores`` gives a core per thread; the new threads are pinned to theirs. Only for a process that only runs
        graphs, on cores of its own, and not while operators run. Raises ValueError for another number of cores.
        """
        if cores and len(cores) != threads:
            raise ValueError(f"{threads} threads need a core each, got {list(cores)}")
        functions = ctypes.CDLL(str(self.path))
        functions.nxd_engage_crew(ctypes.c_int64(threads), (ctypes.c_int32 * threads)(*cores) if cores else None)

    def crew_joins(self) -> int:
        """Return how often a crew thread has joined a piece of work."""
        joins = ctypes.CDLL(str(self.path)).nxd_crew_joins
        joins.restype = ctypes.c_int64
        return joins()


def availability() -> Availability:
    """Return whether :func:`load` can succeed, without building anything. A failed build is not tried again."""
    if _failure is not None:
        return Availability(False, _failure)
    if sys.platform != "linux":
        return Availability(False, f"the native operators need Linux, this is {sys.platform}")
    if sys.byteorder != "little":
        return Availability(False, f"the native operators need a little-endian machine, this is {platform.machine()}")
    if not has_stable_abi():
        return Availability(False, f"the native operators need torch 2.13 or newer, this is {torch.__version__}")
    if _loaded or operators().is_built():
        return Availability(True)
    if find_compiler() is None:
        return Availability(False, no_compiler())
    if not (torch_root() / "include/torch/csrc/stable/library.h").is_file():
        return Availability(False, f"torch {torch.__version__} comes without its C++ headers")
    return Availability(True)


def is_built() -> bool:
    """Return whether the library exists, so that :func:`load` need not compile anything."""
    return availability().ok and (source_hash() in _loaded or operators().is_built())


def builders() -> int:
    """Return how many C++ compilers :func:`load` would run in parallel; 0 if the library exists or cannot be built."""
    return 0 if is_built() or not availability().ok else min(len(operators().sources()), processors())


def operators() -> CppLibrary:
    """Return the sources of the operators, as what is built of them here."""
    release = ".".join(torch.__version__.split(".")[:2])
    return CppLibrary(
        folder=SOURCES,
        kind="native operators",
        takes="one to three minutes on two cores",
        namespace="nxd",
        flags=("-O3", "-fno-math-errno", "-fno-trapping-math"),  # else loops with conditions are not vectorized
        torch=torch_root(),
        torch_version=release,
    )


def load() -> NativeLibrary:
    """Build the library unless it is cached, and register its operators unless this process already has them.

    Raises BackendUnavailableError with the reason (no compiler, or the compiler's output).
    """
    global _failure
    with _lock:
        digest = source_hash()
        if digest in _loaded:
            return _loaded[digest]
        state = availability()
        if not state.ok:
            raise BackendUnavailableError(f"no native operators: {state.reason}")
        try:
            target = operators().built()
        except BackendUnavailableError as error:
            _failure = str(error)
            raise
        return load_file(target)


def load_if_possible() -> NativeLibrary | None:
    """Return the native operators, or None if they cannot be built (no compiler, no headers)."""
    try:
        return load()
    except BackendUnavailableError:
        return None


def load_file(path: str | os.PathLike[str]) -> NativeLibrary:
    """Register the operators of a built library, such as the copy inside an artifact.

    A file whose content hash is already registered is not loaded again. Loading runs native code: only load files you
    trust. Raises ArtifactCorruptError if it is not a native library of this package, ArtifactVersionError if it needs
    another torch or C++ runtime than this process has, and ArtifactError with the loader's reason otherwise.
    """
    path = Path(path).resolve()
    with _lock:
        digest = read_hash(path)
        if digest in _loaded:
            return _loaded[digest]
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            reason = str(error.__cause__ or error)  # torch's own message says only that it failed
            kind = ArtifactVersionError if _OTHER_VERSION.search(reason) else ArtifactError
            raise kind(f"native library {path} cannot be loaded: {reason}") from error
        namespace = f"nxd_{digest[:8]}"
        prefix = f"{namespace}::"
        names = tuple(
            sorted(
                name.removeprefix(prefix) for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix)
            )
        )
        if not names:
            raise ArtifactCorruptError(f"native library {path} registered no operators under {namespace!r}")
        library = NativeLibrary(digest, path, namespace, names)
        _register_fakes(library)
        _loaded[digest] = library
        return library


def read_hash(path: str | os.PathLike[str]) -> str:
    """Return the content hash stored in a library's file, without loading it. Raises ArtifactCorruptError."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = _IDENTITY.search(content)
            digest = found.group(1).decode() if found else None
        whole = is_whole(Path(path))
    except (OSError, ValueError) as error:
        raise ArtifactCorruptError(f"native library {os.fspath(path)} cannot be read: {error}") from error
    if digest is None:
        raise ArtifactCorruptError(f"{os.fspath(path)} is not a native library of this package")
    if not whole:
        raise ArtifactCorruptError(f"native library {os.fspath(path)} is cut short")
    return digest


def source_hash() -> str:
    """Return the content hash of what :func:`load` builds: sources, flags, torch's release, machine."""
    return operators().hash


@functools.cache
def has_stable_abi() -> bool:
    """Return whether torch's library has the C functions of the stable ABI that the operators are compiled against.

    The newest of them came with torch 2.13. The headers of 2.10 to 2.12 lack some of what the operators need.
    """
    library = torch_root() / "lib/libtorch_cpu.so"
    return not library.is_file() or hasattr(ctypes.CDLL(str(library)), "torch_exception_get_what")


def torch_root() -> Path:
    """Return the folder of the torch package."""
    return Path(torch.__file__).parent


_fakes: list[torch.library.Library] = []


def _register_fakes(library: NativeLibrary) -> None:
    """Register fake kernels (shapes and dtypes only), so that graphs with these operators can be compiled."""
    fragment = torch.library.Library(library.namespace, "FRAGMENT")
    _fakes.append(fragment)  # registrations last only as long as the object
    for name, fake in {**_comm_ops.FAKES, **_ops.FAKES}.items():
        if name in library.ops:
            torch.library.register_fake(f"{library.namespace}::{name}", fake, lib=fragment)
