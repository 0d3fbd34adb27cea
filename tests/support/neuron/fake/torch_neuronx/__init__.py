"""A stand-in for torch_neuronx, for tests: exactly the names of ``contracts/torch_neuronx_2_9.json``.

A program is HLO, run by torch_xla in a process of its own, one replica a rank. What is not in the contract raises.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_neuronx import _device
from torch_neuronx._model import SPMDModel

__all__ = ["BucketModelConfig"]


class BucketModelConfig:
    """Of the autobucketing guide; that its arguments are its attributes is not written there."""

    def __init__(
        self,
        bucket_kernel,
        *_,
        shared_state_buffer=None,
        shared_state_buffer_preprocessor=None,
        func_kwargs=None,
    ):
        self.bucket_kernel = bucket_kernel
        self.shared_state_buffer = shared_state_buffer
        self.shared_state_buffer_preprocessor = shared_state_buffer_preprocessor
        self.func_kwargs = func_kwargs


def _parallel_load(checkpoints: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [
        {
            name: _device.DeviceTensor(tensor.clone(memory_format=torch.preserve_format), rank)
            for name, tensor in checkpoint.items()
        }
        for rank, checkpoint in enumerate(checkpoints)
    ]


class _Classes:
    """``torch.classes.neuron``."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(f"Class {name} is not registered: it is not in the contract")


_classes = _Classes()
vars(_classes)["SPMDModel"] = SPMDModel
vars(torch.classes)["neuron"] = _classes
_library = torch.library.Library("neuron", "DEF")
_library.define("_parallel_load(Dict(str, Tensor)[] checkpoints) -> Dict(str, Tensor)[]")
_library.impl("_parallel_load", _parallel_load, "CompositeExplicitAutograd")
_device.register()
