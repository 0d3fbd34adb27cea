"""One rank's tensors: on the host until a graph's body takes them, on that rank's device from then on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxd_infer.artifact.manifest import Manifest
from nxd_infer.artifact.rank_weights import load_initial_states, load_weights


class Cell:
    """A tensor that is replaced by others of its kind."""

    def __init__(self, tensor: Tensor):
        self.value = tensor
        """On the device, a tensor without dimensions is of shape [1] (see :mod:`nxd_infer.backends.hlo.files`)."""
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self._device: str | None = None

    def move_to(self, device: str) -> None:
        """Live there from now on; nothing happens where it does already."""
        if self._device is None:
            self._device = device
            self.put(self.value)

    def put(self, tensor: Tensor) -> None:
        """Hold a copy of the host's ``tensor`` where this cell lives; on the host, the tensor itself."""
        self.value = tensor if self._device is None else as_parameter(tensor).to(self._device)

    def on_host(self) -> Tensor:
        return self.value if self._device is None else self.value.cpu().reshape(self.shape)


def as_parameter(tensor: Tensor) -> Tensor:
    """``tensor`` as a program takes it."""
    return tensor if tensor.dim() else tensor.reshape(1)


class DevicePlacement:
    """States and weights of one rank (``backends.Placement``), as cells."""

    def __init__(self, manifest: Manifest, weight_file: Path, cell: type[Cell] = Cell):
        weights = load_weights(weight_file, manifest.weights)
        self.weights: dict[str, Any] = {name: cell(tensor) for name, tensor in weights.items()}
        self._initial = load_initial_states(weight_file, manifest.states)
        self._specs = {spec.name: spec for spec in manifest.states}
        self.states: dict[str, Any] = {name: cell(self._first(name)) for name in self._specs}

    def _first(self, name: str) -> Tensor:
        if name in self._initial:
            return self._initial[name].clone()
        spec = self._specs[name]
        return torch.zeros(spec.shape, dtype=spec.torch_dtype)

    def reset_states(self) -> None:
        for name, cell in self.states.items():
            cell.put(self._first(name))

    def replace_weights(self, names: Sequence[str], read: Callable[[str], Tensor]) -> Mapping[str, Any]:
        """Nothing is returned: graphs look into the cells at every call."""
        for name in names:
            self.weights[name].put(read(name))
        return {}

    def replace_entry(self, name: str, slot: int, entry: Tensor) -> None:
        """By way of the host: a program that writes one line would be compiled for each device."""
        table = self.weights[name].on_host().clone()
        table[slot] = entry
        self.weights[name].put(table)

    def close(self) -> None:
        self.states, self.weights, self._initial = {}, {}, {}
