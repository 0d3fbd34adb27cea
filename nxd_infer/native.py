"""The native operators, and how C++ sources of this package become a library: built once with the C++ compiler, cached
by content, registered once per process, or carried by a wheel.

``torch.ops.nxd_<hash8>.*`` are the CPU operators of ``csrc/operators``. The namespace contains a hash of the sources
and build flags, so different libraries (for example of two artifacts) can live in one process, and copies of a library
count as one. They use torch's stable ABI and choose the instruction set at run time, so the file does not depend on the
machine it was built on. Building needs a compiler and torch's headers; loading a built file, such as a wheel's, needs
neither.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nxd_infer import ops as _ops
from nxd_infer.comm import ops as _comm_ops
from nxd_infer.errors import ArtifactCorruptError, ArtifactError, ArtifactVersionError, BackendUnavailableError
from nxd_infer.util.cache_dir import cache_dir, opened
from nxd_infer.util.machine import processors

log = logging.getLogger(__name__)
SOURCES = Path(__file__).parent / "csrc/operators"
FILE = "libnxd.so"
PREBUILT = Path(__file__).parent / "prebuilt"
"""Folder of what a wheel carries, by hash."""
FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-DNDEBUG", "-Wall")
BUILD_TIMEOUT = 600.0
"""Seconds to wait for the compiler, or for another process building the same library."""
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


# --- C++ sources as a library -------------------------------------------------------------------------


def find_compiler() -> str | None:
    """Return the C++ compiler that builds the operators here, or None if there is none."""
    chosen = os.environ.get("CXX")
    return shutil.which(chosen) if chosen else shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")


def no_compiler() -> str:
    """Return why :func:`find_compiler` found none, and what to do."""
    chosen = os.environ.get("CXX")
    if chosen:
        return f"the C++ compiler CXX={chosen!r} is not on the PATH"
    return "no C++ compiler (g++, c++ or clang++) on the PATH; install one, or set CXX"


@dataclass(frozen=True)
class CppLibrary:
    """The C++ files of a folder, linked with torch. Its code finds its own hash in ``NXD_HASH``, and in
    ``NXD_NAMESPACE`` a namespace for what it registers with torch."""

    folder: Path
    kind: str
    """What it is called in messages."""
    takes: str
    """How long a build takes, as a user reads it."""
    namespace: str
    """Prefix of its namespace, before the hash."""
    flags: tuple[str, ...]
    torch: Path
    """torch's folder, with ``include`` and ``lib``."""
    torch_version: str
    """Of torch, as far as the compiled code depends on it."""
    links: tuple[str, ...] = ("-ltorch_cpu",)
    includes: tuple[Path, ...] = ()
    """Folders of further headers."""

    @functools.cached_property
    def hash(self) -> str:
        """Sixteen hexadecimal digits of what is built: sources, flags, torch's release, machine."""
        digest = hashlib.sha256()
        for part in (*FLAGS, *self.flags, *self.links, self.namespace, self.torch_version, platform.machine()):
            digest.update(part.encode() + b"\0")
        for file in sorted(path for place in (self.folder, *self.includes) for path in place.rglob("*")):
            if file.suffix in (".cpp", ".h"):
                content = file.read_bytes()
                digest.update(f"{file.name}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()[:16]

    def sources(self) -> list[Path]:
        """Return the files that are compiled, each by a compiler of its own."""
        return sorted(self.folder.rglob("*.cpp"))

    def file(self) -> Path:
        """Return where the library is, or would be."""
        prebuilt = PREBUILT / self.hash / FILE
        return prebuilt if prebuilt.is_file() else cache_dir("native", self.hash) / FILE

    def is_built(self) -> bool:
        """Return whether :meth:`built` need not compile anything."""
        return self.file().is_file()

    def built(self) -> Path:
        """Return the library's file; build it if it is missing.

        Raises BackendUnavailableError with the reason (no compiler, or the compiler's output), UntrustedCacheError if
        another user created the file or can write to it.
        """
        target = self.file()
        if PREBUILT in target.parents:
            return target
        with _only_builder(target.parent, self.kind):
            if not target.is_file() or not is_whole(target):
                self._build(target)
        with opened(target):
            pass
        return target

    def _build(self, target: Path) -> None:
        """Compile and link in a temporary folder beside ``target``, then rename."""
        compiler = find_compiler()
        if compiler is None:
            raise BackendUnavailableError(f"no {self.kind}: {no_compiler()}")
        log.warning("building the %s, only this once: %s (into %s)", self.kind, self.takes, target.parent)
        definitions = (f"-DNXD_NAMESPACE={self.namespace}_{self.hash[:8]}", f"-DNXD_HASH={self.hash}")
        includes = [*(f"-I{place}" for place in (self.folder, *self.includes)), f"-isystem{self.torch / 'include'}"]
        own = f".build-{self.hash}-"
        for left in target.parent.parent.glob(f"{own}*"):  # leftovers of a killed builder: we hold the lock
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=own, dir=target.parent.parent) as scratch:
            sources = self.sources()
            objects = [Path(scratch) / f"{number}.o" for number in range(len(sources))]

            def compile_one(source: Path, output: Path) -> None:
                run([compiler, *FLAGS, *self.flags, *definitions, *includes, "-c", str(source), "-o", str(output)])

            with ThreadPoolExecutor(max_workers=min(len(sources), processors())) as pool:
                list(pool.map(compile_one, sources, objects))
            built = Path(scratch) / FILE
            links = [f"-L{self.torch / 'lib'}", *self.links]
            run([compiler, "-shared", *map(str, objects), *links, "-o", str(built)])
            built.chmod(0o700)  # whatever the umask: a file that others can write to is rejected
            with built.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(built, target)  # last: the file's existence means that the build is complete


def is_whole(path: Path) -> bool:
    """Whether an ELF file has what its header says: linkers put the section headers last. Loading a shorter one may end
    the process."""
    with path.open("rb") as file:
        header = file.read(64)
        if len(header) < 64 or header[:5] != b"\x7fELF\x02":
            return False
        (start,) = struct.unpack_from("<Q", header, 40)
        size, count = struct.unpack_from("<HH", header, 58)
        return os.fstat(file.fileno()).st_size >= start + size * count


@contextlib.contextmanager
def _only_builder(folder: Path, kind: str) -> Iterator[None]:
    """Hold the lock of ``folder`` against other processes; the kernel releases it when the holder ends."""
    from filelock import FileLock  # slow to import; needed only for compiling

    lock = FileLock(folder.with_name(folder.name + ".lock"))
    try:
        lock.acquire(timeout=BUILD_TIMEOUT)
    except TimeoutError:
        raise BackendUnavailableError(
            f"another process has been building the {kind} for {BUILD_TIMEOUT:.0f} s; it holds {lock.lock_file}"
        ) from None
    try:
        yield
    finally:
        lock.release()


def run(command: Sequence[str]) -> None:
    """Run a compiler. Raises BackendUnavailableError with the end of its output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=BUILD_TIMEOUT)  # nosec B603  # a compiler
    except subprocess.TimeoutExpired:
        raise BackendUnavailableError(f"{command[0]} took longer than {BUILD_TIMEOUT:.0f} s") from None
    except OSError as error:
        raise BackendUnavailableError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        output = (done.stderr or done.stdout).strip()
        raise BackendUnavailableError(f"{' '.join(command)}\nended with status {done.returncode}:\n{output[-4000:]}")
