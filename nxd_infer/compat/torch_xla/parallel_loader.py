"""``torch_xla.distributed.parallel_loader``: loaders whose batches end steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from nxd_infer.compat.torch_xla.steps import sync
from nxd_infer.errors import ParallelConfigError

_SPEED = ("batchdim", "loader_prefetch_size", "device_prefetch_size", "host_to_device_transfer_threads")


class MpDeviceLoader:
    """Yields copies of ``loader``'s batches. A step ends before ``batches_per_execution`` of them, and at the end.

    Other options are accepted: they only say how far ahead, and how, batches are moved to a device.
    Raises ParallelConfigError for an ``input_sharding``, and for options that torch_xla does not have.
    """

    def __init__(self, loader: Any, device: Any, *, batches_per_execution: int = 1, **options: Any):
        unknown = [name for name, value in options.items() if name not in _SPEED and value is not None]
        if unknown:
            raise ParallelConfigError(
                f"a loader has no {', '.join(unknown)} on the CPU: leave it out; it knows {', '.join(_SPEED)}"
            )
        self._loader, self._device, self._every = loader, device, batches_per_execution

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._loader):
            if number % self._every == 0:
                sync()
            yield copy.deepcopy(batch)  # as a device has its own, which may be changed in place
        sync()

    def __len__(self) -> int:
        return len(self._loader)


class ParallelLoader:
    """Loads for several devices, of which each process has one here."""

    def __init__(self, cpu_loader: Any, devices: Sequence[Any], **options: Any):
        self._loader = MpDeviceLoader(cpu_loader, devices[0], **options)

    def per_device_loader(self, device: Any) -> MpDeviceLoader:
        return self._loader

    def close(self) -> None:
        """Do nothing."""
