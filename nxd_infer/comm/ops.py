"""``torch.ops.nxd.*``: collectives as operators that name an axis, so that every rank's graph is the same.

These are what export records. Run eagerly they go to the transport of the current context; a backend's lowering
pass replaces them by its native operators of the same meaning.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nxd_infer.comm.protocol import collectives_of
from nxd_infer.context import current_context
from nxd_infer.errors import CollectiveError

LIBRARY = torch.library.Library("nxd", "FRAGMENT")

SCHEMAS = (
    "all_reduce(Tensor x, str axis, str op, int degree) -> Tensor",
    "all_gather(Tensor x, str axis, int dim, int degree) -> Tensor",
    "reduce_scatter(Tensor x, str axis, int dim, int degree) -> Tensor",
    "broadcast(Tensor x, str axis, int src, int degree) -> Tensor",
    "shard(Tensor x, str axis, int dim, int degree) -> Tensor",
    "axis_rank(str axis) -> Tensor",
)
for _schema in SCHEMAS:
    LIBRARY.define(_schema)


def check_divisible(x: Tensor, dim: int, degree: int, what: str) -> None:
    """Raise CollectiveError unless ``x.shape[dim]`` divides by ``degree``."""
    if x.shape[dim] % degree:
        raise CollectiveError(f"{what}: dimension {dim} of shape {tuple(x.shape)} does not divide by {degree} ranks")


def _scaled(x: Tensor, dim: int, numerator: int, denominator: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = shape[dim] * numerator // denominator
    return x.new_empty(shape)


def _run(name: str):
    def implementation(x: Tensor, axis: str, argument, degree: int) -> Tensor:
        return getattr(collectives_of(current_context()), name)(x, axis, argument)

    return implementation


def _shard(x: Tensor, axis: str, dim: int, degree: int) -> Tensor:
    return x.chunk(degree, dim)[current_context().axis(axis).rank].contiguous()


def _axis_rank(axis: str) -> Tensor:
    return torch.tensor(current_context().axis(axis).rank, dtype=torch.int64)


for _name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
    LIBRARY.impl(_name, _run(_name), "CompositeExplicitAutograd")
LIBRARY.impl("shard", _shard, "CompositeExplicitAutograd")
LIBRARY.impl("axis_rank", _axis_rank, "CompositeExplicitAutograd")

torch.library.register_fake("nxd::all_reduce", lambda x, axis, op, degree: x.new_empty(x.shape), lib=LIBRARY)
torch.library.register_fake("nxd::broadcast", lambda x, axis, src, degree: x.new_empty(x.shape), lib=LIBRARY)
torch.library.register_fake("nxd::all_gather", lambda x, axis, dim, degree: _scaled(x, dim, degree, 1), lib=LIBRARY)
torch.library.register_fake("nxd::reduce_scatter", lambda x, axis, dim, degree: _scaled(x, dim, 1, degree), lib=LIBRARY)
torch.library.register_fake("nxd::shard", lambda x, axis, dim, degree: _scaled(x, dim, 1, degree), lib=LIBRARY)
torch.library.register_fake("nxd::axis_rank", lambda axis: torch.empty((), dtype=torch.int64), lib=LIBRARY)
