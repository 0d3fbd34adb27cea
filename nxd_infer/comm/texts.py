"""Short texts of the ranks of an axis, on all of them."""

from __future__ import annotations

import torch

from nxd_infer.comm.functional import all_gather
from nxd_infer.context import ParallelContext
from nxd_infer.util.devices import transport_device


def gather_texts(text: str, context: ParallelContext, axis: str = "pp") -> list[str]:
    """Return the text of each rank of the axis, in their order. A collective."""
    data = text.encode()
    degree = context.axis(axis).degree
    if degree == 1:
        return [text]
    size = torch.tensor([len(data)], dtype=torch.int64, device=transport_device())
    sizes = all_gather(size, context, axis, 0).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
    whole = all_gather(padded.to(transport_device()), context, axis, 0).cpu().view(degree, -1)
    return [bytes(row[:count].tolist()).decode() for row, count in zip(whole, sizes, strict=True)]
