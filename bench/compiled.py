"""Small C programs that measure the machine: compiled like graphs, and cached by content."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from bench.options import home

FLAGS = ("-x", "c", "-std=gnu11", "-O3", "-march=native", "-funroll-loops", "-pthread")


def program(name: str) -> Path:
    """Return the program compiled from ``bench/<name>.c``."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise SystemExit("measuring the machine needs the same compiler as tracing: install g++, or set CXX")
    source = Path(__file__).with_name(f"{name}.c")
    digest = hashlib.sha256(source.read_bytes() + " ".join((compiler, *FLAGS)).encode()).hexdigest()[:12]
    path = home() / f"{name}-{digest}"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *FLAGS, str(source), "-o", str(part)], check=True, timeout=120)
        part.replace(path)
    return path


def output(name: str, *arguments: object, timeout: float = 120.0) -> str:
    """Return the program's output. Raises CalledProcessError on failure, TimeoutExpired after ``timeout`` seconds."""
    command = [str(program(name)), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout).stdout
