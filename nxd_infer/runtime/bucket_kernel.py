"""The user's bucket kernel, which pads a call's inputs and chooses their bucket. It is code from the artifact, so it
runs in rank 0 like the rest of that code; the caller's process reads only tensors.

A question and its answer share one memory file, as safetensors: first the inputs in order; then the bucket's inputs and
its number.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nxd_infer.errors import ArtifactCorruptError, RankFailedError
from nxd_infer.runtime.ipc import Kind

if TYPE_CHECKING:
    from nxd_infer.artifact.reader import LoadedArtifact

Kernel = Callable[[list[Tensor]], tuple[Sequence[Tensor], Any]]


def load_kernel(artifact: LoadedArtifact) -> Kernel | None:
    """Return the kernel (TorchScript), or None if the package does the routing. Called by the rank."""
    file = artifact.bucket_kernel_file
    if file is None:
        return None
    try:
        return torch.jit.load(str(file))
    except RuntimeError as error:
        raise ArtifactCorruptError(f"{file.name} is not a TorchScript bucket kernel: {error}") from error


def answer(kernel: Kernel, fd: int) -> None:
    """Read a question from the file, run the kernel, and replace it by the answer. Called by the rank."""
    file = Path(f"/proc/self/fd/{fd}")
    tensors, bucket = kernel(_unpacked(file.read_bytes()))
    file.write_bytes(_packed(tensors, int(bucket)))


def ask(ranks: Any, degree: int, tensors: Sequence[Tensor]) -> tuple[list[Tensor], int]:
    """Ask the kernel; the caller holds the lock. A RuntimeError has the kernel's error, and the ranks continue."""
    fd = os.memfd_create("nxd-kernel", os.MFD_CLOEXEC)
    try:
        file = Path(f"/proc/self/fd/{fd}")
        file.write_bytes(_packed(tensors))
        ranks.exchange(Kind.ROUTE, fds=[fd] * degree, fatal=False)
        results = _unpacked(file.read_bytes())
    except RankFailedError as error:
        raise RuntimeError(error.summary) from error
    finally:
        os.close(fd)
    return results[:-1], int(results[-1])


def _packed(tensors: Sequence[Tensor], *bucket: int) -> bytes:
    from safetensors.torch import save

    every = [*tensors, *map(torch.tensor, bucket)]
    # Copy, because safetensors rejects tensors that share memory, and a kernel may return an input twice.
    copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in every]
    return save({str(number): tensor for number, tensor in enumerate(copies)})


def _unpacked(content: bytes) -> list[Tensor]:
    from safetensors.torch import load

    tensors = load(content)
    return [tensors[str(number)] for number in range(len(tensors))]
