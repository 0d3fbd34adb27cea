"""``torch.ops.nxd.*``: collectives as operators that name an axis, so that all ranks have the same graph.

Export records these operators. In eager mode they call the transport of the current context; a backend's lowering pass
replaces them by its equivalent native operators.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nxd_infer.comm.protocol import collectives_of
from nxd_infer.context import Axis, current_context
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

EFFECT = (torch.Tag.nondeterministic_seeded,)
"""Keeps compilers from constant-folding a call (its value depends on the rank), and from merging or moving it."""

for _schema in SCHEMAS:
    LIBRARY.define(_schema, tags=EFFECT)


def check_dim(x: Tensor, dim: int, what: str) -> int:
    """Return ``dim`` as a non-negative number. Raises CollectiveError if ``x`` has no such dimension."""
    if not -x.dim() <= dim < x.dim():
        raise CollectiveError(f"{what}: dimension {dim} of a tensor of {x.dim()} dimensions")
    return dim % x.dim()


def check_divisible(x: Tensor, dim: int, degree: int, what: str) -> None:
    """Raise CollectiveError unless ``x.shape[dim]`` divides by ``degree``."""
    if x.shape[dim] % degree:
        raise CollectiveError(f"{what}: dimension {dim} of shape {tuple(x.shape)} does not divide by {degree} ranks")


def _scaled(x: Tensor, dim: int, numerator: int, denominator: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = shape[dim] * numerator // denominator
    return x.new_empty(shape)


def _axis(name: str, degree: int) -> Axis:
    """Return the current context's axis. Raises CollectiveError if the graph was made for another degree."""
    here = current_context().axis(name)
    if here.degree != degree:
        raise CollectiveError(
            f"what was compiled at degree {degree} of axis {name!r} is called at degree {here.degree}: call it in the "
            "context that it was compiled in"
        )
    return here


def _run(name: str):
    def implementation(x: Tensor, axis: str, argument, degree: int) -> Tensor:
        _axis(axis, degree)
        return getattr(collectives_of(current_context()), name)(x, axis, argument)

    return implementation


def own_piece(x: Tensor, dim: int, here: Axis) -> Tensor:
    """Return a copy of this rank's piece: changing a view would also change ``x``, and only on this rank."""
    return x.chunk(here.degree, dim)[here.rank].clone(memory_format=torch.contiguous_format)


def _shard(x: Tensor, axis: str, dim: int, degree: int) -> Tensor:
    return own_piece(x, dim, _axis(axis, degree))


def _axis_rank(axis: str) -> Tensor:
    return torch.tensor(current_context().axis(axis).rank, dtype=torch.int64)


for _name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
    LIBRARY.impl(_name, _run(_name), "CompositeExplicitAutograd")
LIBRARY.impl("shard", _shard, "CompositeExplicitAutograd")
LIBRARY.impl("axis_rank", _axis_rank, "CompositeExplicitAutograd")

FAKES = {
    "all_reduce": lambda x, axis, op, degree: x.new_empty(x.shape),
    "broadcast": lambda x, axis, src, degree: x.new_empty(x.shape),
    "all_gather": lambda x, axis, dim, degree: _scaled(x, dim, degree, 1),
    "reduce_scatter": lambda x, axis, dim, degree: _scaled(x, dim, 1, degree),
    "shard": lambda x, axis, dim, degree: _scaled(x, dim, 1, degree),
    "axis_rank": lambda axis: torch.empty((), dtype=torch.int64),
}
"""Fake kernels (shapes only), shared with the native operators of the same names."""

for _name, _fake in FAKES.items():
    torch.library.register_fake(f"nxd::{_name}", _fake, lib=LIBRARY)
