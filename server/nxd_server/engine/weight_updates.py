"""Change weights and adapters while serving: sharded in the caller's thread, swapped in by the engine's thread."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from nxd_server.engine.engine_thread import EngineThread
from nxd_server.engine.weight_gate import WeightGate
from nxd_server.errors import EngineUnavailableError, WeightsBusyError, weights_busy

if TYPE_CHECKING:
    from nxd_infer.runtime.updates.weights import NewWeights


class WeightUpdates:
    """Allows one change of an engine's weights at a time. Thread-safe."""

    def __init__(self, thread: EngineThread, gate: WeightGate):
        self._thread, self._gate = thread, gate
        self._updating = threading.Lock()

    def update(self, weights: Any, tag: str | None, timeout: float) -> int:
        """See :meth:`~nxd_server.engine.engine_controls.EngineControls.update_weights`."""
        if (state := self._thread.state) != "ready":
            raise EngineUnavailableError(f"the engine takes no weights: it is {state}", state)
        if not self._updating.acquire(blocking=False):
            raise weights_busy()
        try:
            return self._swap(self._thread.model.cut_weights(weights, tag=tag), timeout)
        finally:
            self._updating.release()

    def load_adapter(self, slot: int, folder: str | os.PathLike[str] | None, timeout: float) -> None:
        """Like ``TensorParallelModel.load_adapter``, between two steps. An earlier change and the running step may take
        ``timeout`` seconds each, then it raises WeightsBusyError; EngineUnavailableError if the engine has ended."""
        model = self._thread.model
        if not self._thread.started or self._thread.inside:  # no step is running
            new = model.cut_adapter(slot, folder)
            self._put(new)
            return
        if not self._updating.acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
            raise WeightsBusyError(f"another change of the weights was not over after {timeout:g} s; try again")
        try:
            self._swap(model.cut_adapter(slot, folder), timeout, quiet=False)
        finally:
            self._updating.release()

    def _swap(self, new: NewWeights, timeout: float, *, quiet: bool = True) -> int:
        """Pass sharded weights to the engine's thread; return the version after it. Closes them unless swapped in."""
        return self._gate.change(lambda: self._put(new), timeout, withdrawn=new.close, quiet=quiet)

    def _put(self, new: NewWeights) -> None:
        try:
            self._thread.model.update_weights(new)
        except Exception:
            new.close()
            raise
