"""The protocol of a transport, and the registry that contexts refer to by name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from torch import Tensor

from nxd_infer.context import ParallelContext
from nxd_infer.errors import CollectiveError, NotInitializedError


class NativeOperators(Protocol):
    """The part of :class:`nxd_infer.native.NativeLibrary` that a transport uses."""

    @property
    def ops(self) -> Collection[str]:
        """Names of its operators."""
        ...

    def op(self, name: str) -> Any:
        """Return the operator called ``name``."""
        ...


class Collectives(Protocol):
    """A transport. ``axis`` is an axis name; the rank order of a result is that of ``Axis.ranks``.

    Inputs are never modified; results are new tensors. Every wait has a timeout and then raises CollectiveTimeoutError.
    """

    def all_reduce(self, x: Tensor, axis: str, op: str = "sum") -> Tensor:
        """Element-wise ``sum``, ``max`` or ``min`` over the axis; same shape and dtype as ``x``."""
        ...

    def all_gather(self, x: Tensor, axis: str, dim: int) -> Tensor:
        """Concatenate the ranks' tensors along ``dim``."""
        ...

    def reduce_scatter(self, x: Tensor, axis: str, dim: int) -> Tensor:
        """Sum over the axis, and keep this rank's equal piece along ``dim``."""
        ...

    def all_to_all(self, x: Tensor, axis: str) -> Tensor:
        """Send each rank its equal piece of the first dimension; return the received ones in rank order."""
        ...

    def broadcast(self, x: Tensor, axis: str, src: int = 0) -> Tensor:
        """Return the tensor of the ``src``-th rank of the axis."""
        ...

    def send(self, x: Tensor, axis: str, dst: int) -> None: ...

    def recv(self, x: Tensor, axis: str, src: int) -> Tensor:
        """Receive a tensor like ``x`` (shape and dtype) from the ``src``-th rank of the axis."""
        ...

    def barrier(self, axis: str) -> None: ...

    def close(self) -> None: ...


class RefusingCollectives:
    """The transport of a rank that cannot communicate: every call raises an error with the reason."""

    def __init__(self, reason: str):
        self._reason = reason

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise CollectiveError(self._reason)

    all_reduce = all_gather = reduce_scatter = all_to_all = broadcast = send = recv = barrier = _refuse

    def close(self) -> None:
        """Do nothing."""


_registry: dict[str, Collectives] = {}


def register_collectives(key: str, collectives: Collectives) -> None:
    """Register ``collectives`` for contexts whose ``collectives`` field is ``key``."""
    if key in _registry:
        raise CollectiveError(f"collectives {key!r} are already registered; unregister them first")
    _registry[key] = collectives


def unregister_collectives(key: str) -> None:
    """Close and remove a transport; an unknown key is ignored."""
    transport = _registry.pop(key, None)
    if transport is not None:
        transport.close()


def collectives_of(context: ParallelContext) -> Collectives:
    """Return the transport of ``context``. Raises NotInitializedError without one (``local``, degree above 1)."""
    try:
        return _registry[context.collectives]
    except KeyError:
        raise NotInitializedError(
            f"rank {context.rank} of {context.world_size} has no transport {context.collectives!r}: "
            "call initialize_model_parallel() after torch.distributed.init_process_group(), "
            "or run inside parallel_model_trace()"
        ) from None
