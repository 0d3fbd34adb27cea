"""Read and write single states of ranks, for debugging: one tensor by name, as safetensors in a memory file.

A tensor with elements becomes the state; the rank answers with the state. The file of every other rank is empty.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nxd_infer.errors import InputMismatchError
from nxd_infer.runtime.ipc import Kind

if TYPE_CHECKING:
    from nxd_infer.artifact.manifest import Manifest
    from nxd_infer.backends.base import Placement


def answer(place: Placement, fd: int) -> None:
    """Called by the rank."""
    from safetensors.torch import load, save

    file = Path(f"/proc/self/fd/{fd}")
    for name, new in load(content).items() if (content := file.read_bytes()) else ():
        file.write_bytes(save({name: place.state(name, new if new.numel() else None).contiguous()}))


def ask(ranks: Any, manifest: Manifest, name: str, rank: int, new: Tensor | None = None) -> Tensor:
    """See ``TensorParallelModel.state``; the caller holds the lock."""
    from safetensors.torch import load, save

    if not 0 <= rank < manifest.world_size:
        raise InputMismatchError(f"there is no rank {rank}: the ranks are 0 to {manifest.world_size - 1}")
    specs = {spec.name: spec for spec in manifest.of_rank(rank).states}
    if name not in specs:
        raise InputMismatchError(f"rank {rank} has no state {name!r}; its states are {', '.join(specs) or 'none'}")
    dtype, shape = specs[name].torch_dtype, specs[name].shape
    if new is not None and (new.dtype, list(new.shape)) != (dtype, shape):
        raise InputMismatchError(f"{name!r} is {dtype}{shape}, got {new.dtype}{list(new.shape)}")
    own, others = (os.memfd_create(f"nxd-state-{which}", os.MFD_CLOEXEC) for which in ("own", "others"))
    try:
        file = Path(f"/proc/self/fd/{own}")
        file.write_bytes(save({name: torch.empty(0) if new is None else new.detach().cpu().contiguous()}))
        ranks.exchange(Kind.STATE, fds=[own if each == rank else others for each in range(manifest.world_size)])
        return load(file.read_bytes())[name]
    finally:
        os.close(own)
        os.close(others)
