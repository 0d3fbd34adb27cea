"""``nxd-infer doctor``: show what this machine has, what it lacks, and how to fix that."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys

from nxd_infer import __version__, native
from nxd_infer.backends import registry
from nxd_infer.backends.base import Availability
from nxd_infer.cli.console import console, table
from nxd_infer.errors import ArtifactBackendError, UntrustedCacheError
from nxd_infer.util.cache_dir import cache_dir
from nxd_infer.util.machine import cpu_features
from nxd_infer.util.memory import available_memory, total_memory
from nxd_infer.util.processors import available_cores, compute_threads, processor_share
from nxd_infer.util.units import size

OPTIONAL = {
    "fastapi": "serving: pip install 'nxd-infer[server]'",
    "uvicorn": "serving: pip install 'nxd-infer[server]'",
    "tokenizers": "text in and out: pip install 'nxd-infer[server]'",
    "tensorboard": "training curves: pip install 'nxd-infer[train]'",
    "transformers": "examples that wrap Hugging Face models: pip install 'nxd-infer[hf]'",
    "cloudpickle": "tracing functions defined in a notebook: pip install cloudpickle",
}


def instructions() -> str:
    """Those of the processor's that matter here."""
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
    return " ".join(flag for flag in wanted if flag in cpu_features()) or "none of the relevant ones"


def cores() -> str:
    """Return for example ``"16 of 16 (a container's share of 4): ranks compute with 4 threads in all"``."""
    share = processor_share()
    limit = f" (a container's share of {share:g})" if share < len(available_cores()) else ""
    threads = compute_threads()
    together = f"{threads} thread{'s' if threads > 1 else ''}"
    return f"{len(available_cores())} of {os.cpu_count()}{limit}: ranks compute with {together} in all"


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return None


def run() -> int:
    """Print the tables; return 0 if the default backend can run here, else 1."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    rows = [
        ("nxd_infer", __version__),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("torch", version_of("torch") or "missing"),
        ("cores", cores()),
        ("cpu features", instructions()),
        ("memory", f"{size(available_memory())} free of {size(total_memory())}"),
        (
            "C++ compiler",
            compiler or f"missing: install g++ to trace with the {registry.DEFAULT} backend (serving needs none)",
        ),
    ]
    try:
        rows.append(("cache", str(cache_dir())))
        found = native.availability()
        rows.append(("native operators", "ok" if found.ok else f"missing: {found.reason}"))
        if native.is_built():
            rows.append(("their instructions", native.load().cpu_level()))
    except UntrustedCacheError as error:
        rows.append(("cache", f"refused: {error}"))
    table("This machine", ("what", "found"), rows)

    usable = {}
    for name in registry.names():
        try:
            probe = registry.get(name).probe()
        except ArtifactBackendError as error:  # of another package, and broken
            probe = Availability(False, str(error))
        usable[name] = (probe.ok, "ok" if probe.ok else probe.reason)
    table("Backends", ("backend", "state"), [(name, text) for name, (_, text) in usable.items()])

    packages = [(name, version_of(name) or f"absent; {why}") for name, why in OPTIONAL.items()]
    table("Optional packages", ("package", "found"), packages)
    if usable[registry.DEFAULT][0]:
        console.print("ready: `nxd-infer demo` runs everything end to end on this machine")
        return 0
    console.print(f"the default backend cannot run: {usable[registry.DEFAULT][1]}", style="bold red")
    return 1
