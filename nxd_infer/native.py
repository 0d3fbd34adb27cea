"""The native operators: built once with the C++ compiler, cached by content, registered once a process.

``torch.ops.nxd_<hash8>.*`` hold the CPU operators of ``csrc/``. The namespace is a hash of the sources and the build's
flags, so that libraries of different contents (of two artifacts, say) live in one process, and copies of one library
are the same library. They use torch's stable ABI and pick instruction sets at run time: the file does not depend on
the machine it was built on. Building needs a compiler and torch's headers; loading a built file needs neither.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import mmap
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nxd_infer import ops as _ops
from nxd_infer.comm import ops as _comm_ops
from nxd_infer.errors import ArtifactCorruptError, BackendUnavailableError
from nxd_infer.util.cache_dir import cache_dir, opened
from nxd_infer.util.locks import only_one
from nxd_infer.util.processors import processors

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-DNDEBUG", "-Wall")
BUILD_TIMEOUT = 600.0
"""Seconds to wait for the compiler, or for another process that is building the same library."""

_IDENTITY = re.compile(rb"NXD-NATIVE-LIBRARY:([0-9a-f]{16}):END")
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
    build_seconds: float | None = None
    """What the build took, when this process did it."""

    def op(self, name: str) -> Any:
        """The overload ``torch.ops.<namespace>.<name>.default``; KeyError names the operators there are."""
        if name not in self.ops:
            raise KeyError(f"native library {self.hash} has no operator {name!r}; it has {list(self.ops)}")
        return getattr(getattr(torch.ops, self.namespace), name).default

    def cpu_level(self) -> str:
        """The best instructions that its kernels use here: portable, avx2, avx512, avx512_bf16 or amx_bf16."""
        level = ctypes.CDLL(str(self.path)).nxd_cpu_level
        level.restype = ctypes.c_char_p
        return level().decode()

    def engage_crew(self, threads: int, cores: Sequence[int] = ()) -> None:
        """From now on its operators share work among ``threads`` threads: the calling one and new ones that wait awake
        for more (``csrc/crew.h``), where until then they used torch's. 1 goes back to those.

        ``cores`` names one for each thread; the new ones keep to theirs. For a process that does nothing but run
        graphs, on cores of its own; not while operators run. Raises ValueError for another number of cores.
        """
        if cores and len(cores) != threads:
            raise ValueError(f"{threads} threads need a core each, got {list(cores)}")
        if hasattr(functions := ctypes.CDLL(str(self.path)), "nxd_engage_crew"):  # an artifact's may be older
            functions.nxd_engage_crew(ctypes.c_int64(threads), (ctypes.c_int32 * threads)(*cores) if cores else None)

    def crew_joins(self) -> int:
        """How often a thread of the crew has come to share a piece of work."""
        joins = ctypes.CDLL(str(self.path)).nxd_crew_joins
        joins.restype = ctypes.c_int64
        return joins()


def availability() -> Availability:
    """Whether :func:`load` can work, without building anything. A build that failed before stays failed."""
    if _failure is not None:
        return Availability(False, _failure)
    if sys.platform != "linux":
        return Availability(False, f"the native operators need Linux, this is {sys.platform}")
    if sys.byteorder != "little":
        return Availability(False, f"the native operators need a little-endian machine, this is {platform.machine()}")
    if _torch_version() < (2, 10):
        return Availability(False, f"the native operators need torch 2.10 or newer, this is {torch.__version__}")
    if _loaded or (_folder() / "libnxd.so").is_file():
        return Availability(True)
    if _compiler() is None:
        return Availability(False, _no_compiler())
    if not (_torch_root() / "include/torch/csrc/stable/library.h").is_file():
        return Availability(False, f"torch {torch.__version__} comes without its C++ headers")
    return Availability(True)


def is_built() -> bool:
    """Whether :func:`load` finds the library, so that nothing has to be compiled."""
    return availability().ok and (source_hash() in _loaded or (_folder() / "libnxd.so").is_file())


def builders() -> int:
    """How many C++ compilers :func:`load` would run at a time; 0 where the library is there, or cannot be built."""
    return 0 if is_built() or not availability().ok else min(len(_sources()), processors())


def _sources() -> list[Path]:
    return sorted(SOURCES.glob("*.cpp"))


def load() -> NativeLibrary:
    """Build the library unless the cache has it, and register its operators unless this process has them.

    Raises BackendUnavailableError with the reason (no compiler, or what the compiler said).
    """
    global _failure
    with _lock:
        digest = source_hash()
        if digest in _loaded:
            return _loaded[digest]
        state = availability()
        if not state.ok:
            raise BackendUnavailableError(f"no native operators: {state.reason}")
        target = _folder() / "libnxd.so"
        seconds = None
        try:
            with _only_builder(_folder()):
                if not target.is_file():
                    seconds = _build(digest, target)
            with opened(target):  # a file that others have made, or could write to, is refused
                pass
        except BackendUnavailableError as error:
            _failure = str(error)
            raise
        return load_file(target, build_seconds=seconds)


def load_file(path: str | os.PathLike[str], *, build_seconds: float | None = None) -> NativeLibrary:
    """Register the operators of a built library, such as the copy inside an artifact.

    A file whose content hash is registered already is not loaded again. Loading runs native code: the file must be one
    to trust. Raises ArtifactCorruptError when it is no native library of this package, or cannot be loaded.
    """
    path = Path(path).absolute()
    with _lock:
        digest = read_hash(path)
        if digest in _loaded:
            return _loaded[digest]
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            raise ArtifactCorruptError(f"native library {path} cannot be loaded: {error}") from error
        namespace = f"nxd_{digest[:8]}"
        prefix = f"{namespace}::"
        names = tuple(
            sorted(
                name.removeprefix(prefix) for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix)
            )
        )
        if not names:
            raise ArtifactCorruptError(f"native library {path} registered no operators under {namespace!r}")
        library = NativeLibrary(digest, path, namespace, names, build_seconds)
        _register_fakes(library)
        _loaded[digest] = library
        return library


def link_name(digest: str) -> str:
    """What a compiled graph is linked with, as ``-l`` takes it."""
    return f"nxd_{digest}"


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
    """While this lasts, compilers that this process starts find the libraries under their :func:`link_name`."""
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


def read_hash(path: str | os.PathLike[str]) -> str:
    """The content hash inside a library's file, without loading it. Raises ArtifactCorruptError."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = _IDENTITY.search(content)
            digest = found.group(1).decode() if found else None
            whole = len(content) >= _elf_size(content)
    except (OSError, ValueError) as error:
        raise ArtifactCorruptError(f"native library {os.fspath(path)} cannot be read: {error}") from error
    if digest is None:
        raise ArtifactCorruptError(f"{os.fspath(path)} is not a native library of this package")
    if not whole:
        raise ArtifactCorruptError(f"native library {os.fspath(path)} is cut short")
    return digest


def _elf_size(content: mmap.mmap) -> int:
    """Bytes an ELF file has at least: linkers put the section headers last. Loading a shorter one may crash."""
    if len(content) < 64 or content[:5] != b"\x7fELF\x02":
        return 64
    (start,) = struct.unpack_from("<Q", content, 40)
    size, count = struct.unpack_from("<HH", content, 58)
    return start + size * count


def source_hash() -> str:
    """The content hash of what :func:`load` builds: sources, flags, torch's release, machine."""
    digest = hashlib.sha256()
    for part in (*FLAGS, ".".join(map(str, _torch_version())), platform.machine()):
        digest.update(part.encode() + b"\0")
    for file in sorted(SOURCES.iterdir()):
        if file.suffix in (".cpp", ".h"):
            content = file.read_bytes()
            digest.update(f"{file.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _torch_root() -> Path:
    return Path(torch.__file__).parent


def _folder() -> Path:
    return cache_dir("native", source_hash())


def _compiler() -> str | None:
    chosen = os.environ.get("CXX")
    return shutil.which(chosen) if chosen else shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")


def _no_compiler() -> str:
    chosen = os.environ.get("CXX")
    if chosen:
        return f"the C++ compiler CXX={chosen!r} is not on the PATH"
    return "no C++ compiler (g++, c++ or clang++) on the PATH; install one, or set CXX"


@contextlib.contextmanager
def _only_builder(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder`` against other processes; the kernel releases it when its holder ends."""
    path = folder.with_name(folder.name + ".lock")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(only_one(path, BUILD_TIMEOUT))
        except TimeoutError:
            raise BackendUnavailableError(
                f"another process has been building the native operators for {BUILD_TIMEOUT:.0f} s; it holds {path}"
            ) from None
        yield


def _build(digest: str, target: Path) -> float:
    """Compile and link into a temporary folder beside ``target``, then rename. Returns the seconds it took."""
    compiler = _compiler()
    if compiler is None:
        raise BackendUnavailableError(f"no native operators: {_no_compiler()}")
    begin = time.monotonic()
    root = _torch_root()
    definitions = (f"-DNXD_NAMESPACE=nxd_{digest[:8]}", f"-DNXD_HASH={digest}", f"-isystem{root / 'include'}")
    own = f".build-{digest}-"
    for left in target.parent.parent.glob(f"{own}*"):  # of a builder that was killed: the lock is ours
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=own, dir=target.parent.parent) as scratch:
        sources = _sources()
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]

        def compile_one(source: Path, output: Path) -> None:
            _run([compiler, *FLAGS, *definitions, "-c", str(source), "-o", str(output)])

        with ThreadPoolExecutor(max_workers=min(len(sources), processors())) as pool:
            list(pool.map(compile_one, sources, objects))
        built = Path(scratch) / "libnxd.so"
        # Compiled graphs name the library they need by its content (``shims``): a file loaded before is found so.
        name = f"-Wl,-soname,lib{link_name(digest)}.so"
        _run([compiler, "-shared", name, *map(str, objects), f"-L{root / 'lib'}", "-ltorch_cpu", "-o", str(built)])
        seconds = time.monotonic() - begin
        record = {"hash": digest, "compiler": compiler, "flags": FLAGS, "torch": torch.__version__, "seconds": seconds}
        (Path(scratch) / "build.json").write_text(json.dumps(record, indent=2))
        built.chmod(0o700)  # whatever the umask: a file that others may write to is refused
        os.replace(Path(scratch) / "build.json", target.parent / "build.json")
        os.replace(built, target)  # last: the file's presence means that the build is whole
    return seconds


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT)  # nosec B603  # a compiler
    except subprocess.TimeoutExpired:
        raise BackendUnavailableError(f"{command[0]} took longer than {BUILD_TIMEOUT:.0f} s") from None
    except OSError as error:
        raise BackendUnavailableError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        output = (done.stderr or done.stdout).strip()
        raise BackendUnavailableError(f"{' '.join(command)}\nended with status {done.returncode}:\n{output[-4000:]}")


_fakes: list[torch.library.Library] = []


def _register_fakes(library: NativeLibrary) -> None:
    """Shapes and dtypes without data, so that graphs that hold the operators can be made and compiled."""
    fragment = torch.library.Library(library.namespace, "FRAGMENT")
    _fakes.append(fragment)  # registrations end with the object
    for name, fake in {**_comm_ops.FAKES, **_ops.FAKES}.items():
        if name in library.ops:
            torch.library.register_fake(f"{library.namespace}::{name}", fake, lib=fragment)
