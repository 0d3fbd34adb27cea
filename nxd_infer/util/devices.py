"""The host's memory, the training device, the random generators of both, and whether a process group is there.

Outside backends, only this module and ``comm/launched.py``, which gives each rank its device, name a device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

HOST = torch.device("cpu")
ACCELERATOR = "cuda"
"""Key of the accelerator's random state in a checkpoint."""
CHECKED = ("cpu", "cuda")
"""Devices whose values can be read without interrupting a recorded graph."""


def on_host(tensor: Tensor) -> bool:
    return tensor.device.type == HOST.type


def on_xla(tensor: Tensor) -> bool:
    return tensor.device.type == "xla"


def group_exists() -> bool:
    """Whether this process is in a process group of ``torch.distributed``."""
    return dist.is_available() and dist.is_initialized()


def transport_device() -> torch.device:
    """Return the device whose memory the process group communicates."""
    if group_exists() and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    if group_exists() and dist.get_backend() == "xla":
        import torch_xla  # pyright: ignore  # which has made the group

        return torch_xla.device()
    return HOST


def accelerator_state() -> Tensor | None:
    """Return the state of the accelerator's random generator; None if none is in use."""
    return torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None


def set_accelerator_state(state: Tensor) -> None:
    torch.cuda.set_rng_state(state)


def has_accelerator() -> bool:
    return torch.cuda.is_available()


def seed_accelerator(seed: int) -> None:
    torch.cuda.manual_seed(seed)


def generator_states() -> list[Tensor]:
    """Return the states of the default random generators: the host's, and the accelerator's if that is in use."""
    accelerator = accelerator_state()
    return [torch.get_rng_state(), *([] if accelerator is None else [accelerator])]


def set_generator_states(states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        set_accelerator_state(states[1])


def seed_generators(seed: int) -> None:
    """Seed the default generators in use; torch.manual_seed() would seed CUDA for good where it has not come up yet."""
    torch.default_generator.manual_seed(seed)
    if accelerator_state() is not None:
        seed_accelerator(seed)


@contextlib.contextmanager
def keeping_generators() -> Iterator[None]:
    """Let the default generators be after the block what they were before it."""
    before = generator_states()
    try:
        yield
    finally:
        set_generator_states(before)
