"""Which NeuronCores there are, which degrees they can run, and which of them this process takes.

A core belongs to one process until that ends, and the cores of a model are a group that starts at a multiple of its
degree. The runtime is told by ``NEURON_RT_VISIBLE_CORES`` and reads that at its first call, so it is set before.
"""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nxd_infer.errors import BackendUnavailableError, TraceConfigError
from nxd_infer.util.core_locks import lock_core

VISIBLE, COUNT = "NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"
ROOT = "NXD_INFER_NEURON_ROOT"
"""Where ``/dev`` and ``/sys`` are looked for, for a container that has its host's elsewhere, and for tests."""
DEGREES = {"inf2": (1, 2, 4, 8, 12, 24), "trn1": (1, 2, 8, 32)}
"""Of tensor parallelism, by platform: others have no ring of devices to exchange values in."""
CORES_A_DEVICE = 2
_PRODUCT = "sys/devices/virtual/dmi/id/product_name"


@dataclass(frozen=True)
class Machine:
    """This machine, or the part of it that a container shows."""

    instance: str
    """``inf2.xlarge``; empty where it does not say."""
    devices: int

    @property
    def platform(self) -> str:
        """``inf2``, ``trn1``, or empty for another or an unknown one."""
        return next((name for name in DEGREES if self.instance.startswith(name)), "")

    @property
    def others(self) -> str:
        """Why its Neuron devices are not those that graphs are compiled for; empty if they are or it does not say."""
        if self.platform or not re.match(r"(inf|trn)\d", self.instance):
            return ""
        return f"the instance {self.instance} has devices of another kind than Inf2 and Trn1: run on one of them"

    @property
    def name(self) -> str:
        """What there is, for people: ``6 Neuron devices of inf2.24xlarge``."""
        count = f"{self.devices} Neuron device{'s' if self.devices != 1 else ''}"
        return f"{count} of {self.instance}" if self.instance else count

    @property
    def cores(self) -> range:
        return range(self.devices * CORES_A_DEVICE)

    def __str__(self) -> str:
        return f"this {self.instance}" if self.platform else "this machine"


def machine() -> Machine:
    root = Path(os.environ.get(ROOT, "/"))
    try:
        instance = (root / _PRODUCT).read_text(errors="replace").strip()
    except OSError:
        instance = ""
    with contextlib.suppress(OSError):
        devices = [name for name in os.listdir(root / "dev") if re.fullmatch(r"neuron\d+", name)]
        return Machine(instance, len(devices))
    return Machine(instance, 0)


def check_degree(degree: int, platform: str) -> None:
    """Raise TraceConfigError for a degree that no instance of ``platform`` has."""
    if degree not in DEGREES[platform]:
        fitting = ", ".join(map(str, DEGREES[platform]))
        raise TraceConfigError(f"tp_degree={degree} is none that {platform} can run: choose one of {fitting}")


def usable(found: Machine) -> tuple[list[int], int]:
    """The cores that this process may take, in order, and how many of them, as the environment says.

    Raises BackendUnavailableError for a variable that is not a list or number of cores, or names one that does not
    exist.
    """
    chosen, count = os.environ.get(VISIBLE, "").strip(), os.environ.get(COUNT, "").strip()
    there = list(found.cores)
    if chosen:
        cores = _listed(chosen)
        if missing := [core for core in cores if core not in found.cores]:
            raise BackendUnavailableError(
                f"{VISIBLE}={chosen} names the core {missing[0]} and {found} has {len(there)}: name cores from 0 to "
                f"{len(there) - 1}"
            )
        return cores, len(cores)
    if not count or count == "0":  # 0, as the runtime has it: all
        return there, len(there)
    if not count.isdecimal():
        raise BackendUnavailableError(f"{COUNT}={count!r} is not a number of cores: give one such as 2, or unset it")
    if int(count) > len(there):
        raise BackendUnavailableError(f"{COUNT}={count} and {found} has {len(there)} cores: give at most that many")
    return there, int(count)  # any free ones, as the runtime has it


def _listed(text: str) -> list[int]:
    cores: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not ends or int(ends[2] or ends[1]) < int(ends[1]):
            raise BackendUnavailableError(f"{VISIBLE}={text!r} is not a list of cores: write it as 0-3, or 0,1")
        cores += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    return sorted(set(cores))


def groups(cores: Sequence[int], degree: int) -> list[range]:
    """The groups of ``degree`` of these cores that a model can run on."""
    there = set(cores)
    starts = [core for core in cores if core % degree == 0 and there.issuperset(range(core, core + degree))]
    return [range(start, start + degree) for start in starts]


class Claim:
    """Cores that this process has taken, until it ends or this is closed."""

    def __init__(self, cores: range, files: list[int]):
        self.cores = cores
        self._files = files

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []


def claim(degree: int) -> Claim:
    """Take a free group of ``degree`` cores, and name it in ``NEURON_RT_VISIBLE_CORES``.

    Free as far as processes of this package and user go: whether others use one, the runtime says at its first call.
    Raises BackendUnavailableError where there is no such group, or none is free.
    """
    found = machine()
    if not found.devices:
        raise BackendUnavailableError(NO_DEVICE)
    cores, most = usable(found)
    if most < degree:
        left = f" of which {VISIBLE if os.environ.get(VISIBLE) else COUNT} leaves {most}"
        raise BackendUnavailableError(
            f"the model needs {degree} cores and {found} has {len(found.cores)}"
            f"{left if most < len(found.cores) else ''}: trace it for fewer ranks, or take a larger instance"
        )
    fitting = groups(cores, degree)
    if not fitting:
        raise BackendUnavailableError(
            f"none of the cores {_text(cores)} starts a group of {degree}: it starts at a multiple of {degree}, so set "
            f"{VISIBLE} to such a group, as 0-{degree - 1}"
        )
    for group in fitting:
        files = _locked(group)
        if files is not None:
            os.environ[VISIBLE] = f"{group[0]}-{group[-1]}" if degree > 1 else str(group[0])
            os.environ.pop(COUNT, None)
            return Claim(group, files)
    raise BackendUnavailableError(
        f"all groups of {degree} among the cores {_text(cores)} are in use by other processes, which keep them until "
        "they end: end one, or take a larger instance"
    )


def _text(cores: Sequence[int]) -> str:
    return ", ".join(map(str, cores))


def lock_kind() -> str:
    """Of the machine's cores: another root is another machine's."""
    root = os.path.realpath(os.environ.get(ROOT, "/"))
    return f"neuron-cores-{zlib.crc32(root.encode()):08x}"


def _locked(group: range) -> list[int] | None:
    """Lock each core; None where another process has one."""
    files: list[int] = []
    for core in group:
        try:
            found = lock_core(lock_kind(), core)
        except OSError:  # nowhere to lock: the runtime says what is in use
            continue
        if found is None:
            Claim(group, files).close()
            return None
        files.append(found)
    return files


NO_DEVICE = (
    "there is no Neuron device (/dev/neuron0): run on an Inf2 or Trn1 instance with the driver aws-neuronx-dkms, or "
    "give the container its devices (--device=/dev/neuron0)"
)
