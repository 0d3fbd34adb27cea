"""Short texts of the ranks of an axis on all of them, and named tensors on the first one."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from nxd_infer.comm.functional import all_gather, broadcast
from nxd_infer.context import ParallelContext
from nxd_infer.util.devices import transport_device
from nxd_infer.util.dtypes import dtype_name, dtype_of


def gather_texts(text: str, context: ParallelContext, axis: str = "pp") -> list[str]:
    """Return the text of each rank of the axis, in their order. A collective."""
    if context.axis(axis).degree == 1:
        return [text]
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
    return [bytes(row.tolist()).decode() for row in gather_bytes(data, context, axis)]


def gather_bytes(data: Tensor, context: ParallelContext, axis: str = "pp") -> list[Tensor]:
    """Return the bytes of each rank of the axis (uint8 on the host, of any number), in their order. A collective."""
    degree = context.axis(axis).degree
    size = torch.tensor([len(data)], dtype=torch.int64, device=transport_device())
    sizes = all_gather(size, context, axis, 0).tolist()
    padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
    padded[: len(data)] = data
    whole = all_gather(padded.to(transport_device()), context, axis, 0).cpu().view(degree, -1)
    return [row[:count] for row, count in zip(whole, sizes, strict=True)]


def gather_named(tensors: Mapping[str, Tensor], context: ParallelContext) -> dict[str, Tensor]:
    """Return the tensors of every pipeline rank on the first one, moved one by one; the others get none. A collective.

    Of a name that several have, it is the first rank's.
    """
    if context.pp.degree == 1:
        return dict(tensors)
    facts = [(name, list(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in tensors.items()]
    gathered: dict[str, Tensor] = {}
    for stage, text in enumerate(gather_texts(json.dumps(facts), context)):
        for name, shape, dtype in json.loads(text):
            own = stage == context.pp.rank
            tensor = tensors[name] if own else torch.empty(shape, dtype=dtype_of(dtype))
            whole = broadcast(tensor.to(transport_device()), context, "pp", stage).cpu()
            if context.pp.rank == 0:
                gathered.setdefault(name, whole)
    return gathered
