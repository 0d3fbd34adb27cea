"""The names of files in an artifact."""

from __future__ import annotations

BUCKET_KERNEL_NAME = "bucket_kernel.pt"
"""The user's bucket kernel as TorchScript; it exists if ``requires`` lists ``bucket-kernel``.

Write it with ``writer.write_bytes(BUCKET_KERNEL_NAME, kernel.save_to_buffer())``: on a full disk, ``torch.jit.save``
to a path aborts the whole process.
"""


def weight_name(rank: int) -> str:
    return f"weights/rank_{rank:02d}.safetensors"
