"""A library of C++ sources that a wheel carries, or that is compiled where it is first needed, once, and kept in the
cache by its content."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from nxd_infer.errors import BackendUnavailableError
from nxd_infer.util.cache_dir import cache_dir, opened
from nxd_infer.util.machine import processors

log = logging.getLogger(__name__)
FILE = "libnxd.so"
PREBUILT = Path(__file__).parents[1] / "prebuilt"
"""Folder of what a wheel carries, by hash."""
FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-DNDEBUG", "-Wall")
BUILD_TIMEOUT = 600.0
"""Seconds to wait for the compiler, or for another process building the same library."""


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
