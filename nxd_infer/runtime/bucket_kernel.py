"""The user's bucket kernel, which pads a call's inputs and chooses their bucket. It is code of the artifact, and runs
where that runs: rank 0 loads it and answers the caller, who reads nothing but tensors.

A question and its answer lie in one memory file, as safetensors: the inputs in order; then those of the bucket, and its
number.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nxd_infer.errors import ArtifactCorruptError, RankFailedError
from nxd_infer.runtime.ranks.channel import Kind

if TYPE_CHECKING:
    from nxd_infer.artifact.reader import LoadedArtifact

Kernel = Callable[[list[Tensor]], tuple[Sequence[Tensor], Any]]


def load_kernel(artifact: LoadedArtifact) -> Kernel | None:
    """The rank's side: the kernel (TorchScript), or None where the package routes."""
    file = artifact.bucket_kernel_file
    if file is None:
        return None
    try:
        return torch.jit.load(str(file))
    except RuntimeError as error:
        raise ArtifactCorruptError(f"{file.name} is not a TorchScript bucket kernel: {error}") from error


def answer(kernel: Kernel, fd: int) -> None:
    """The rank's side: read a question from the file, run the kernel, put its answer in place."""
    file = Path(f"/proc/self/fd/{fd}")
    tensors, bucket = kernel(_unpacked(file.read_bytes()))
    file.write_bytes(_packed(tensors, int(bucket)))


def ask(ranks: Any, degree: int, tensors: Sequence[Tensor]) -> tuple[list[Tensor], int]:
    """The caller's side. RuntimeError says what the kernel raised; the ranks go on. The caller holds the lock."""
    fd = os.memfd_create("nxd-kernel", os.MFD_CLOEXEC)
    try:
        file = Path(f"/proc/self/fd/{fd}")
        file.write_bytes(_packed(tensors))
        ranks.exchange(Kind.ROUTE, fds=[fd] * degree, fatal=False)
        found = _unpacked(file.read_bytes())
    except RankFailedError as error:
        raise RuntimeError(error.summary) from error
    finally:
        os.close(fd)
    return found[:-1], int(found[-1])


def _packed(tensors: Sequence[Tensor], *bucket: int) -> bytes:
    from safetensors.torch import save

    every = [*tensors, *map(torch.tensor, bucket)]
    # Copies: safetensors takes no two tensors of one memory, and a kernel may return an input twice.
    copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in every]
    return save({str(number): tensor for number, tensor in enumerate(copies)})


def _unpacked(content: bytes) -> list[Tensor]:
    from safetensors.torch import load

    found = load(content)
    return [found[str(i)] for i in range(len(found))]
