"""``nxd-infer doctor``: show what this machine has, what it lacks, and how to fix that."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys

from nxd_infer import __version__, native
from nxd_infer.backends import registry
from nxd_infer.backends.base import Availability
from nxd_infer.cli.console import console, table, verbatim
from nxd_infer.errors import CacheUnavailableError, NxdError, UntrustedCacheError
from nxd_infer.util.cache_dir import cache_dir
from nxd_infer.util.machine import available_cores, compute_threads, cpu_features, processor_share
from nxd_infer.util.memory import available_memory, total_memory
from nxd_infer.util.units import size
from nxd_models import registry as models

INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
"""Those of a processor that matter here."""
OPTIONAL = {
    "fastapi": "serving: pip install 'nxd-infer[server]'",
    "uvicorn": "serving: pip install 'nxd-infer[server]'",
    "tokenizers": "text in and out: pip install 'nxd-infer[server]'",
    "tensorboard": "training curves: pip install 'nxd-infer[train]'",
    "lightning": "training with PyTorch Lightning: pip install 'nxd-infer[lightning]'",
    "transformers": "tokenizers of models to trace, and Hugging Face's own modules: pip install 'nxd-infer[hf]'",
    "gguf": "GGUF files as models: pip install 'nxd-infer[hf]'",
    "cloudpickle": "tracing functions defined in a notebook: pip install cloudpickle",
}


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


def probe(name: str) -> tuple[Availability, Availability]:
    """Return whether a backend can run here and whether it can trace; one that breaks says why."""
    try:
        backend = registry.get(name)
        return backend.probe(), backend.probe_compiler()
    except NxdError as error:  # of another package, which cannot be imported
        text = str(error)
    except Exception as error:
        text = f"its probe failed: {type(error).__name__}: {error}"
    return Availability(False, text), Availability(False, text)


def row(name: str, runs: Availability, traces: Availability) -> tuple[str, ...]:
    packages = ", ".join(f"{package} {version}" for package, version in runs.versions.items())
    devices = ", ".join(f"{device}, {count} core{'s' if count != 1 else ''}" for device, count in runs.devices.items())
    return (name, "yes" if runs else "no", "yes" if traces else "no", packages or "-", devices or "-")


def model_types() -> tuple[str, list[str]]:
    """Return the model types that can be read, and what is wrong with those of other packages."""
    broken = []
    for name in models.model_types():
        try:
            if name not in models.BUILT_IN:
                models.find(name)
        except NxdError as error:
            broken.append(str(error))
    return ", ".join(models.model_types()), broken


def run() -> int:
    """Print the tables; return 0 if some backend can trace and run here, else 1."""
    rows = [
        ("nxd_infer", __version__),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("torch", version_of("torch") or "missing"),
        ("cores", cores()),
        (
            "cpu features",
            " ".join(flag for flag in INSTRUCTIONS if flag in cpu_features()) or "none of the relevant ones",
        ),
        ("memory", f"{size(available_memory())} free of {size(total_memory())}"),
        (
            "C++ compiler",
            native.find_compiler()
            or "missing: install g++ to build the native operators, unless a wheel has brought them (next rows)",
        ),
    ]
    try:
        rows.append(("cache", str(cache_dir())))
        operators = native.availability()
        rows.append(("native operators", "ok" if operators.ok else f"missing: {operators.reason}"))
        if native.is_built():
            rows.append(("their instructions", native.load().cpu_level()))
    except UntrustedCacheError as error:
        rows.append(("cache", f"refused: {error}"))
    except CacheUnavailableError as error:
        rows.append(("cache", f"missing: {error}"))
    except NxdError as error:
        rows.append(("native operators", f"cannot be loaded: {error}"))
    table("This machine", ("what", "found"), rows)

    probes = {name: probe(name) for name in registry.names()}
    columns = ("backend", "runs", "traces", "packages", "runs on")
    table("Backends", columns, [row(name, *both) for name, both in probes.items()])
    for name, (runs, traces) in probes.items():
        texts = [] if runs else [f"cannot run: {runs.reason}"]
        if not traces and traces.reason != runs.reason:
            texts.append(f"cannot trace: {traces.reason}")
        texts += [runs.limits] if runs.limits else []
        if traces and (known := registry.get(name).targets):
            texts.append(f"--target {', '.join(known)}")
        for text in texts:
            verbatim(f"{name}: {text}", end="\n")
    families, broken = model_types()
    for text in (families, *broken):
        verbatim(f"models: {text}", end="\n")

    packages = [(name, version_of(name) or f"absent; {why}") for name, why in OPTIONAL.items()]
    table("Optional packages", ("package", "found"), packages)
    usable = [name for name, both in probes.items() if all(both)]
    if (default := registry.default()) in usable:
        console.print(
            f"ready: `nxd-infer demo` runs everything end to end on this machine (default backend: {default})"
        )
    elif usable:
        console.print(f"the default backend {default} does not work here: choose with --backend {' or '.join(usable)}")
    else:
        console.print("no backend can run and trace here, see above", style="bold red")
    return 0 if usable else 1
