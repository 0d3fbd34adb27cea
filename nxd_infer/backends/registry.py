"""The available backends: ours in a table, those of other packages by entry points.

A package registers one under ``[project.entry-points."nxd_infer.backends"]`` as ``name = "module:object"``. It is
imported on first use; if that fails, the error names it and the reason, and other backends still work.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from nxd_infer.errors import ArtifactBackendError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from nxd_infer.backends.base import Backend

GROUP = "nxd_infer.backends"
BUILT_IN = {
    "cpu": "nxd_infer.backends.cpu.backend",
    "xla": "nxd_infer.backends.xla.backend",
    "neuron": "nxd_infer.backends.neuron.backend",
}
VARIABLE = "NXD_INFER_BACKEND"
_FORMERLY = {"eager": "cpu", "inductor": "cpu"}
"""What a backend was called, in artifacts and programs."""


def canonical(name: str) -> str:
    """Return today's name of a backend."""
    return _FORMERLY.get(name, name)


def default() -> str:
    """Return the backend of a trace that names none: ``$NXD_INFER_BACKEND``, else what this machine is made for.

    ``neuron`` where there are NeuronCores that it can compile for and run on; ``xla`` where torch_xla is installed and
    the CPU's operators cannot be, as on torch 2.9; else ``cpu``.
    """
    if chosen := os.environ.get(VARIABLE, "").strip():
        return chosen
    cpu, xla, neuron = BUILT_IN
    if get(neuron).probe() and get(neuron).probe_compiler():
        return neuron
    return xla if get(xla).probe() and get(cpu).probe().limits else cpu


def names() -> tuple[str, ...]:
    """Return the names of all backends, whether they can run here or not."""
    return tuple(dict.fromkeys([*BUILT_IN, *_others()]))


def get(name: str) -> Backend:
    """Return the backend ``name``. Raises ArtifactBackendError if there is none (lists the existing ones) or its
    import fails (with the reason)."""
    name = canonical(name)
    if name in BUILT_IN:
        return importlib.import_module(BUILT_IN[name]).BACKEND
    others = _others()
    if name not in others:
        raise ArtifactBackendError(f"there is no backend {name!r}; backends are {', '.join([*BUILT_IN, *others])}")
    entry = others[name]
    try:
        return entry.load()
    except Exception as error:
        package = entry.dist.name if entry.dist is not None else entry.value
        raise ArtifactBackendError(
            f"the backend {name!r} of {package} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def with_import_path(environment: dict[str, str], name: str) -> dict[str, str]:
    """Return ``environment`` for a process that runs backend ``name``, with its package on the path."""
    entry = None if name in BUILT_IN else _others().get(name)
    if entry is None or entry.dist is None:
        return environment
    paths = [*filter(None, [environment.get("PYTHONPATH")]), str(entry.dist.locate_file(""))]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


def _others() -> dict[str, EntryPoint]:
    """Return the first entry point of each name; our names cannot be replaced."""
    from importlib.metadata import entry_points

    entries: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        if canonical(entry.name) not in BUILT_IN:
            entries.setdefault(entry.name, entry)
    return entries
