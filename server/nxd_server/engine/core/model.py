"""The model as the engine drives it: what ``RankModel`` and ``TensorParallelModel`` are to it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from nxd_infer.artifact.manifest import Manifest
from nxd_infer.runtime.ranks.health import RankHealth

Tensors = Mapping[str, Any]
"""By name: torch's or NumPy's, as the model takes them. An InputBlock costs a model that takes arrays least."""


class PendingStep(Protocol):
    """A step that the ranks have, from its start until its outputs are taken."""

    @property
    def seconds(self) -> float:
        """How long the slowest rank worked on it, once it is over."""
        ...

    def result(self, copy: bool = True) -> dict[str, Any]:
        """Wait for it; outputs by name. Without ``copy`` they hold until the next step is begun."""
        ...


class NewWeights(Protocol):
    """Weights that were cut for every rank, and are in none yet. Who does not hand them on closes them."""

    def close(self) -> None: ...


class Model(Protocol):
    """A traced model and its ranks. One thread calls it at a time; what says so takes no lock."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def arrays(self) -> bool:
        """Whether it takes and gives NumPy's arrays, and :meth:`begin_bucket` works."""
        ...

    @property
    def spare_cores(self) -> int:
        """Cores that the ranks' threads leave to this process; below 1 when they have every one."""
        ...

    @property
    def lead_cores(self) -> Sequence[int]:
        """Cores on which this process would hold up a whole rank."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """What ended the ranks, the first of it. Takes no lock."""
        ...

    def health(self) -> Sequence[RankHealth]:
        """Every rank. Takes no lock."""
        ...

    def restart(self) -> Any:
        """Start the ranks anew, whatever state they are in; updated weights are kept."""
        ...

    def run_bucket(self, name: str, inputs: Tensors) -> dict[str, Any]:
        """Run the graph ``name``; outputs by name."""
        ...

    def begin_bucket(self, name: str, inputs: Tensors, *, checked: bool = False) -> PendingStep:
        """As :meth:`run_bucket`, without waiting; steps run in the order in which they were begun, two at most.

        ``checked``: every value of an InputBlock is known to be within its input's limits.
        """
        ...

    def reset_states(self) -> None:
        """Put every state back to its traced value."""
        ...

    def cut_weights(self, weights: Any, *, tag: str | None = None) -> NewWeights:
        """Check weights and cut them for every rank; nothing changes yet, and steps go on. From any thread."""
        ...

    def cut_adapter(self, slot: int, folder: str | os.PathLike[str] | None) -> NewWeights:
        """As :meth:`cut_weights`, of a LoRA adapter for ``slot``."""
        ...

    def update_weights(self, weights: Any) -> None:
        """Put what was cut into every rank, between two steps."""
        ...


class RoutingModel(Model, Protocol):
    """One that also chooses the graph of a call by itself."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the graph that the inputs route to."""
        ...
