"""The model interface that the engine drives; ``RankModel`` and ``TensorParallelModel`` implement it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from nxd_infer.artifact.manifest import Manifest
from nxd_infer.runtime.ranks import PendingStep, RankHealth

if TYPE_CHECKING:
    from nxd_infer.runtime.updates.weights import NewWeights

Tensors = Mapping[str, Any]
"""Tensors by name: torch's or NumPy's, as the model takes them. For a NumPy model an InputBlock is cheapest."""


class Model(Protocol):
    """A traced model and its ranks. One thread calls it at a time; methods that take no lock say so."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def arrays(self) -> bool:
        """Whether inputs and outputs are NumPy arrays, and :meth:`begin_bucket` works."""
        ...

    @property
    def spare_cores(self) -> int:
        """Number of cores that the ranks' threads leave to this process; below 1 if they use all."""
        ...

    @property
    def lead_cores(self) -> Sequence[int]:
        """Cores on which this process would delay a whole rank."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """The first error that ended the ranks. Takes no lock."""
        ...

    def health(self) -> Sequence[RankHealth]:
        """Return the health of every rank. Takes no lock."""
        ...

    def restart(self) -> Any:
        """Restart the ranks, whatever their state; updated weights are kept."""
        ...

    def run_bucket(self, name: str, inputs: Tensors) -> dict[str, Any]:
        """Run the graph ``name``; return outputs by name."""
        ...

    def begin_bucket(self, name: str, inputs: Tensors, *, checked: bool = False) -> PendingStep:
        """Like :meth:`run_bucket`, without waiting; steps run in the order in which they begin. At most two, or with a
        pipeline one more than it has stages, may be begun and not taken.

        ``checked``: every value of an InputBlock is already known to be within its input's limits.
        """
        ...

    def reset_states(self) -> None:
        """Reset every state to its traced value."""
        ...

    def cut_weights(self, weights: Any, *, tag: str | None = None) -> NewWeights:
        """Check weights and shard them for every rank; nothing changes yet, and steps continue. Thread-safe.

        The owner of the result closes it or passes it on to :meth:`update_weights`.
        """
        ...

    def cut_adapter(self, slot: int, folder: str | os.PathLike[str] | None) -> NewWeights:
        """Like :meth:`cut_weights`, for a LoRA adapter in ``slot``."""
        ...

    def update_weights(self, weights: Any) -> None:
        """Load sharded weights into every rank, between two steps."""
        ...
