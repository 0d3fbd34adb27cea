"""``torch.classes.neuron.SPMDModel``: what the documents say that it checks, and that it does not."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from torch_neuronx import _cores, _executor
from torch_neuronx._device import DeviceTensor

MAGIC = b"NEFF of a stand-in for neuronx-cc\n"
_TYPES = {
    "UINT8": (torch.uint8, torch.bool),
    "INT8": (torch.int8,),
    "INT16": (torch.int16,),
    "INT32": (torch.int32,),
    "INT64": (torch.int64,),
    "FLOAT16": (torch.float16,),
    "BFLOAT16": (torch.bfloat16,),
    "FLOAT": (torch.float32,),
}


class SPMDModel:
    def __init__(self, neff: bytes, metaneff: bytes, local_ranks_size: int, world_size: int):
        for value, kind in ((neff, bytes), (metaneff, bytes), (local_ranks_size, int), (world_size, int)):
            _is(value, kind)
        if not neff.startswith(MAGIC):
            raise RuntimeError("the NEFF is of another compiler than this stand-in's")
        target, _, self._hlo = neff.removeprefix(MAGIC).partition(b"\n")
        _cores.take(local_ranks_size, target.decode())
        if world_size != local_ranks_size:
            raise RuntimeError(f"{world_size} ranks over several machines are not in the contract")
        self._ranks = local_ranks_size
        self._meta = json.loads(metaneff)
        self._aliases = {int(result): parameter for result, parameter in self._meta["aliases"].items()}
        self._check_aliases()
        self._states: list[dict[str, Tensor]] | None = None
        self._weights: list[dict[str, Tensor]] = []
        self._complete = False
        self._program = _executor.load(self._hlo, self._ranks)

    def _check_aliases(self) -> None:
        taken = list(self._aliases.values())
        if len(set(taken)) != len(taken):
            raise RuntimeError("two results alias one state")
        for result, parameter in self._aliases.items():
            out, into = self._meta["outputs"][result], self._meta["inputs"][parameter]
            if into["type"] != "INPUT_STATE":
                raise RuntimeError(f"result {result} aliases {into['key']!r}, which is no state")
            if (out["shape"], out["data_type"]) != (into["shape"], into["data_type"]):
                raise RuntimeError(f"result {result} is not of the shape and type of the state {into['key']!r}")

    def initialize(self, states: list[dict[str, Tensor]], weights: list[dict[str, Tensor]], start_rank: int) -> None:
        _is(start_rank, int)
        if start_rank != 0:
            raise RuntimeError(f"start_rank={start_rank} on one machine")
        for given in (states, weights):
            _is(given, list)
            if len(given) != self._ranks:
                raise RuntimeError(f"{len(given)} dictionaries for {self._ranks} ranks")
            for rank, tensors in enumerate(given):
                for name, tensor in tensors.items():
                    if not isinstance(tensor, DeviceTensor) or tensor.rank != rank:
                        raise RuntimeError(f"{name!r} is not on the core of rank {rank}")
        self._states, self._weights = states, weights
        # As the runtime does: what has no tensor of its name is not missed, and the answers are zeros.
        self._complete = all(
            entry["key"] in (states if entry["type"] == "INPUT_STATE" else weights)[rank]
            for rank in range(self._ranks)
            for entry in self._meta["inputs"]
            if entry["type"] != "USER_INPUT"
        )

    def is_initialized(self) -> bool:
        return self._states is not None

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        _is(inputs, list)
        entries = [entry for entry in self._meta["inputs"] if entry["type"] == "USER_INPUT"]
        if len(inputs) != len(entries):
            raise RuntimeError(f"{len(inputs)} inputs, the program takes {len(entries)}")
        for tensor, entry in zip(inputs, entries, strict=True):
            if isinstance(tensor, DeviceTensor) or tensor.device.type != "cpu":
                raise RuntimeError("forward takes tensors of the host")
            _fits(tensor, entry)
            if tensor.dtype == torch.int64 and tensor.numel() and int(tensor.abs().max()) > 2**31 - 1:
                raise RuntimeError(f"{entry['key']!r} holds a number that int32 cannot, as which int64 is computed")
        if self._states is None or not self._complete:
            results = [_zeros(entry) for entry in self._meta["outputs"]]
        else:
            results = self._run(inputs)
        return [DeviceTensor(result, 0) for number, result in enumerate(results) if number not in self._aliases]

    def _run(self, inputs: list[Tensor]) -> list[Tensor]:
        assert self._states is not None
        ranks = []
        for rank in range(self._ranks):
            own = iter(inputs)
            ranks.append([self._argument(entry, rank, own) for entry in self._meta["inputs"]])
        found = _executor.run(self._program, ranks)
        for rank, results in enumerate(found):
            for result, parameter in self._aliases.items():
                state: Any = self._states[rank][self._meta["inputs"][parameter]["key"]]
                state.host.copy_(results[result])
        for result, entry in zip(found[0], self._meta["outputs"], strict=True):
            _fits(result, entry)
        return found[0]

    def _argument(self, entry: dict[str, Any], rank: int, inputs: Any) -> Tensor:
        if entry["type"] == "USER_INPUT":
            return next(inputs)
        held: Any = (self._states or []) if entry["type"] == "INPUT_STATE" else self._weights
        tensor = held[rank][entry["key"]].host
        _fits(tensor, entry)
        return tensor

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"SPMDModel has no method {name} in the contract")


def _is(value: Any, kind: type) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")


def _fits(tensor: Tensor, entry: dict[str, Any]) -> None:
    if list(tensor.shape) != entry["shape"] or tensor.dtype not in _TYPES[entry["data_type"]]:
        raise RuntimeError(
            f"{entry['key'] or entry['name']!r} is {tensor.dtype}{list(tensor.shape)}, "
            f"the program has {entry['data_type']}{entry['shape']}"
        )


def _zeros(entry: dict[str, Any]) -> Tensor:
    return torch.zeros(entry["shape"], dtype=_TYPES[entry["data_type"]][0])
