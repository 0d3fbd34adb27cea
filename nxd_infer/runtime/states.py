"""Read and write single states of ranks, for debugging: in a memory file for each rank, as safetensors by name.

The rank copies a tensor that has elements into its state, and answers with the state. The other ranks' file is empty.
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
    """Do what the file says, and write the answer there. Called by the rank."""
    from safetensors.torch import load, save

    file = Path(f"/proc/self/fd/{fd}")
    asked = load(content) if (content := file.read_bytes()) else {}
    for name, new in asked.items():
        state = place.state(name, new if new.numel() else None)
        file.write_bytes(save({name: state.contiguous()}))


def ask(ranks: Any, manifest: Manifest, name: str, rank: int, new: Tensor | None = None) -> Tensor:
    """Return state ``name`` of ``rank``, after replacing it by ``new``; the caller holds the lock.

    Raises InputMismatchError for another rank, state, shape or dtype than there is.
    """
    from safetensors.torch import load, save

    if not 0 <= rank < manifest.world_size:
        raise InputMismatchError(f"there is no rank {rank}: the ranks are 0 to {manifest.world_size - 1}")
    specs = {spec.name: spec for spec in manifest.of_rank(rank).states}
    if name not in specs:
        raise InputMismatchError(f"rank {rank} has no state {name!r}; its states are {', '.join(specs) or 'none'}")
    spec = specs[name]
    if new is not None and (list(new.shape), new.dtype) != (spec.shape, spec.torch_dtype):
        raise InputMismatchError(f"{name!r} is {spec.dtype}{spec.shape}, got {new.dtype}{list(new.shape)}")
    fds = [os.memfd_create(f"nxd-state-{which}", os.MFD_CLOEXEC) for which in ("other", "own")]
    try:
        file = Path(f"/proc/self/fd/{fds[1]}")
        file.write_bytes(save({name: torch.empty(0) if new is None else new.detach().cpu().contiguous()}))
        ranks.exchange(Kind.STATE, fds=[fds[each == rank] for each in range(manifest.world_size)])
        return load(file.read_bytes())[name]
    finally:
        for fd in fds:
            os.close(fd)
