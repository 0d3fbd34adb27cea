"""The one place where torch_neuronx is called.

None of it ran on a NeuronCore: names and signatures are those of public documents and callers, which
``contracts/torch_neuronx_2_9.json`` lists with source and date. Tests compare it with a stand-in, and on a real machine
(``NXD_INFER_REAL_NEURON=1``) with what is installed there.

libneuronxla is not reached at all: of its compile function the documents give the equivalent command line of neuronx-cc
(:mod:`.compiler`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nxd_infer.backends.neuron.sdk import INSTALL, installed
from nxd_infer.errors import BackendUnavailableError

MESSAGE = "torch_neuronx.proto.metaneff_pb2"
DEVICE = "privateuseone"
TYPES = {
    torch.bool: "UINT8",
    torch.uint8: "UINT8",
    torch.int8: "INT8",
    torch.int16: "INT16",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
    torch.float32: "FLOAT",
}


def load() -> None:
    """Import torch_neuronx, which registers its classes, operators and device. Raises BackendUnavailableError where it
    cannot be, or is another package of that name (that of Trn2 has other names)."""
    try:
        importlib.import_module("torch_neuronx")
        _ = _namespace().SPMDModel, torch.ops.neuron._parallel_load, importlib.import_module(MESSAGE).MetaNeff
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise BackendUnavailableError(
            f"torch_neuronx {installed()} lacks what a model is run by ({error}): {INSTALL}"
        ) from error


def _namespace() -> Any:
    classes: Any = torch.classes
    return classes.neuron


def meta_tensor(tensor: Any, name: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """Fill an entry of a MetaNeff's tensors. Raises BackendUnavailableError for a dtype that it has no name for."""
    message = importlib.import_module(MESSAGE).MetaTensor
    if dtype not in TYPES:
        raise BackendUnavailableError(f"{name} is {dtype}, which {MESSAGE} has no name for: trace the model again")
    tensor.name = name.encode()
    tensor.shape[:] = list(shape)
    tensor.data_type = getattr(message, TYPES[dtype])


@dataclass(frozen=True)
class Taken:
    """A parameter of a program: its place among the weights or states by ``key``, or among the inputs."""

    kind: str
    """USER_INPUT, INPUT_STATE or INPUT_WEIGHT."""
    key: str
    dtype: torch.dtype
    shape: Sequence[int]


def metaneff(taken: Sequence[Taken], given: Sequence[tuple[torch.dtype, Sequence[int]]], aliases: Mapping[int, int]):
    """The bytes of the MetaNeff of a program: its parameters and results in order, and which parameter's memory takes
    which result, by their numbers. neuronx-cc names them ``input0`` and ``output0``."""
    module = importlib.import_module(MESSAGE)
    message = module.MetaNeff()
    for number, each in enumerate(taken):
        tensor = message.input_tensors.add()
        meta_tensor(tensor, f"input{number}", each.dtype, each.shape)
        tensor.type = getattr(module.MetaTensor, each.kind)
        if each.kind == "USER_INPUT":
            tensor.user_input_key = each.key.encode()
        else:
            tensor.checkpoint_key = each.key.encode()
    for number, (dtype, shape) in enumerate(given):
        meta_tensor(message.output_tensors.add(), f"output{number}", dtype, shape)
    for result, parameter in aliases.items():
        message.output_aliases_to[result] = parameter
    return message.SerializeToString()


def program(neff: bytes, metaneff: bytes, degree: int) -> Any:
    """A program of ``degree`` ranks, all of which this process runs."""
    return _namespace().SPMDModel(neff, metaneff, degree, degree)


def initialize(model: Any, states: list[dict[str, Tensor]], weights: list[dict[str, Tensor]]) -> None:
    """Give a program its states and weights, a dictionary for each rank. Raises BackendUnavailableError when it does
    not take them: it would answer with zeros."""
    model.initialize(states, weights, 0)
    if not model.is_initialized():
        raise BackendUnavailableError("the Neuron runtime did not initialise the model: see NEURON_RT_LOG_LEVEL=INFO")


def forward(model: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Run on all ranks; the results of the first one that are nobody's new state, in order, on the host."""
    return model.forward(inputs)


def to_cores(tensors: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Copies of the host's tensors on the cores, a dictionary for each rank."""
    return torch.ops.neuron._parallel_load(tensors)


def zeros(shape: Sequence[int], dtype: torch.dtype, rank: int) -> Tensor:
    return torch.zeros(list(shape), dtype=dtype, device=f"{DEVICE}:{rank}")
