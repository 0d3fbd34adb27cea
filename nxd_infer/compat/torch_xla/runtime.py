"""``torch_xla.runtime``: this process among the ranks, and its one device."""

from __future__ import annotations

import os
import resource
from typing import Any

import torch
import torch.distributed as dist

from nxd_infer.comm.launched import launched_world
from nxd_infer.compat.utilities import always
from nxd_infer.errors import ParallelConfigError
from nxd_infer.util.devices import HOST, group_exists


def world_size(defval: int = 1) -> int:
    """Return the number of ranks: of the process group, else of the launcher. ``defval``: no effect, as below."""
    return dist.get_world_size() if group_exists() else launched_world()


def global_ordinal(defval: int = 0) -> int:
    """Return this process's rank."""
    return dist.get_rank() if group_exists() else int(os.environ.get("RANK", 0)) if launched_world() > 1 else 0


def local_ordinal(defval: int = 0) -> int:
    """Return this process's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", global_ordinal()))


def local_process_count() -> int:
    """Return how many processes this machine has."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def host_index() -> int:
    """Return this machine's number."""
    return int(os.environ.get("GROUP_RANK", 0))


device_count, device_type, is_spmd, using_pjrt = always(1), always("CPU"), always(False), always(True)
global_device_count = global_runtime_device_count = process_count = world_size
process_index = global_ordinal
local_device_count = local_process_count
addressable_device_count = addressable_runtime_device_count = device_count


def device(index: int | None = None, devkind: str | None = None) -> torch.device:
    """Return this process's device, the CPU. Raises ParallelConfigError for another than the first."""
    if index not in (None, 0):
        raise ParallelConfigError(f"device {index} is asked for, but each process has one, of index 0: leave it out")
    return HOST


devices = always([HOST])


def real_devices(devices: Any = None) -> list[str]:
    return [f"CPU:{global_ordinal()}"]


def manual_seed(seed: int, device: Any = None) -> None:
    """Seed the CPU's generator."""
    torch.manual_seed(seed)


def memory_info(device: Any = None) -> dict[str, int]:
    """Return the bytes that this process has used at most (``bytes_used``) and the machine's (``bytes_limit``)."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"bytes_used": used, "bytes_limit": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
