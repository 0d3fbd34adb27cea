"""Swap weights in a model's ranks: all ranks check them before any uses them, and restarted ranks get them again."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from nxd_infer.artifact.manifest import Manifest
from nxd_infer.errors import RankFailedError, WeightSchemaError
from nxd_infer.runtime.ipc import Kind
from nxd_infer.runtime.time_bounds import Bounds

if TYPE_CHECKING:
    from torch import Tensor

    from nxd_infer.runtime.updates.weights import NewWeights

log = logging.getLogger(__name__)


class WeightSwaps:
    """The updates since the artifact was loaded, oldest first. The caller holds the model's lock."""

    def __init__(self, manifest: Manifest, bounds: Bounds):
        """``bounds``: time limits for the ranks to check new weights, and to use them."""
        self._manifest = manifest
        self._bounds = bounds
        self._entries: list[NewWeights] = []

    def swap(self, ranks: Any, new: NewWeights) -> None:
        """Give the ranks ``new`` and keep it; close it if that fails. Raises as ``update_weights`` does.

        Ranks that were told to use it do so even if the caller is interrupted; then it is kept, too.
        """
        if new in self._entries or any(file.closed for file in new.files):
            raise WeightSchemaError("these weights were swapped in before, or given back: call cut_weights() again")
        used = False
        try:
            if new.manifest is not self._manifest:
                raise WeightSchemaError("these weights were cut for another model; call this model's cut_weights()")
            self._prepare(ranks, new)
            used = True
            self._commit(ranks)
        except Exception:  # nothing has changed, or the ranks have been ended
            used = False
            raise
        finally:
            replaced = [entry for entry in self._entries if entry.names <= new.names] if used else [new]
            for entry in replaced:
                entry.close()
            if used:
                self._entries = [*(entry for entry in self._entries if entry not in replaced), new]

    def replay(self, ranks: Any) -> None:
        """Give newly started ranks the weights that were swapped in before."""
        for entry in self._entries:
            self._prepare(ranks, entry)
            self._commit(ranks)

    @property
    def names(self) -> set[str]:
        """The weights that were swapped in."""
        return {name for entry in self._entries for name in entry.names}

    def tensors(self, rank: int) -> dict[str, Tensor]:
        """Return a rank's swapped weights, memory-mapped, by name."""
        return {name: tensor for entry in self._entries for name, tensor in entry.tensors(rank).items()}

    def _prepare(self, ranks: Any, new: NewWeights) -> None:
        fds = [file.fileno() for file in new.files]
        try:
            ranks.exchange(Kind.PREPARE_WEIGHTS, timeout=self._bounds.load, fds=fds, fatal=False)
        except RankFailedError as error:
            ranks.exchange(Kind.ABORT_WEIGHTS)
            log.error("a rank refused new weights: %s", error.summary if error.foreseen else error)
            text = f"a rank refused the new weights and nothing was changed: {error.summary}"
            raise WeightSchemaError(text) from error

    def _commit(self, ranks: Any) -> None:
        ranks.exchange(Kind.COMMIT_WEIGHTS, timeout=self._bounds.load)
