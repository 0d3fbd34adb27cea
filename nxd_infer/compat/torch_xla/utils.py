"""``torch_xla.utils.utils`` and ``torch_xla.amp``: the little that scripts take from there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from nxd_infer.util.devices import HOST


class SampleGenerator:
    """Yields the same ``data`` ``sample_count`` times."""

    def __init__(self, data: Any, sample_count: int):
        self._data, self._count = data, sample_count

    def __iter__(self) -> Iterator[Any]:
        return iter([self._data] * self._count)

    def __len__(self) -> int:
        return self._count


def getenv_as(name: str, type: Any, defval: Any = None) -> Any:
    """Return an environment variable as a ``type``."""
    text = os.environ.get(name)
    return defval if text is None else bool(int(text)) if type is bool else type(text)


def autocast(device: Any, **options: Any) -> torch.autocast:
    """Return ``torch.autocast`` for the CPU."""
    return torch.autocast(HOST.type, **options)
