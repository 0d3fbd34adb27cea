"""A machine with NeuronCores that are none: the stand-ins on the paths, and the files by which a machine is known."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nxd_infer.backends.neuron import cores
from nxd_infer.util.core_locks import lock_folder

REAL = os.environ.get("NXD_INFER_REAL_NEURON") == "1"
"""Run on this machine's own cores, with the real packages."""
TARGET = (cores.machine().platform if REAL else "") or "inf2"
"""What programs that run here are compiled for."""
FAKE = Path(__file__).with_name("fake")
HAS_XLA = importlib.util.find_spec("torch_xla") is not None
NEEDS_XLA = "torch_xla is not installed here: make test-xla has it"


def described(root: Path, instance: str = "inf2.48xlarge", devices: int = 12) -> Path:
    """Write what a machine says of itself below ``root``."""
    product = root / "sys/devices/virtual/dmi/id/product_name"
    product.parent.mkdir(parents=True, exist_ok=True)
    product.write_text(instance + "\n")
    (root / "dev").mkdir(exist_ok=True)
    for number in range(devices):
        (root / f"dev/neuron{number}").touch()
    return root


@contextlib.contextmanager
def neuron_machine(root: Path, instance: str = "inf2.48xlarge", devices: int = 12) -> Iterator[None]:
    """This process, and those that it starts, are on such a machine inside the block."""
    if REAL:
        yield
        return
    described(root, instance, devices)
    paths = {
        "PATH": os.pathsep.join([str(FAKE / "bin"), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(FAKE)])),
        "NXD_INFER_NEURON_ROOT": str(root),
    }
    before = {name: os.environ.get(name) for name in [*paths, "NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"]}
    os.environ.update(paths)
    sys.path.append(str(FAKE))
    try:
        yield
    finally:
        sys.path.remove(str(FAKE))
        shutil.rmtree(lock_folder(cores.lock_kind()), ignore_errors=True)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def forget(patch: pytest.MonkeyPatch) -> None:
    """Until ``patch`` is undone, the stand-in that an earlier test of this process has imported is not."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch_neuronx"]:
        patch.delitem(sys.modules, name)
