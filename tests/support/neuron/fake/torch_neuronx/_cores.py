"""The cores of this process, as the runtime takes them: by ``NEURON_RT_VISIBLE_CORES``, at its first call, for good."""

from __future__ import annotations

import fcntl
import json
import os
import re
from pathlib import Path

CONTRACT = Path(__file__).parents[5] / "contracts" / "torch_neuronx_2_9.json"
VARIABLE = "NEURON_RT_VISIBLE_CORES"
_taken: list[int] = []
_files: list[int] = []


def take(ranks: int, target: str) -> None:
    limits = json.loads(CONTRACT.read_text())["limits"]
    root = Path(os.environ["NXD_INFER_NEURON_ROOT"])
    instance = (root / "sys/devices/virtual/dmi/id/product_name").read_text().strip()
    platform = next(name for name in limits["degrees"] if instance.startswith(name))
    if target != platform:
        raise RuntimeError(f"NRT: the NEFF is for {target} and this is {instance}")
    if ranks not in limits["degrees"][platform]:
        raise RuntimeError(f"NRT: {ranks} ranks on {platform}, which takes {limits['degrees'][platform]}")
    if not _taken:
        _take(root, limits["cores_a_device"])
    if len(_taken) < ranks or _taken[0] % ranks:
        raise RuntimeError(f"NRT: the cores {_taken} hold no group of {ranks}, which starts at a multiple of that")


def _take(root: Path, cores_a_device: int) -> None:
    text = os.environ.get(VARIABLE, "")
    ends = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not ends:
        raise RuntimeError(f"NRT: {VARIABLE}={text!r} is no range")
    cores = range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    there = cores_a_device * sum(bool(re.fullmatch(r"neuron\d+", name)) for name in os.listdir(root / "dev"))
    for core in cores:
        if core >= there:
            raise RuntimeError(f"NRT: there is no core {core} of {there}")
        _files.append(os.open(root / f"core{core}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            fcntl.flock(_files[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RuntimeError(f"NRT: core {core} is in use by another process") from error
    _taken.extend(cores)
