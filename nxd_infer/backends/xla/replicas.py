"""A thread for each rank, each with a device of torch_xla's: the replicas of this process.

They are made once, and live as long as it: the runtime's devices cannot be changed once it has started.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from nxd_infer.backends.hlo.base import torch_xla_environment
from nxd_infer.errors import BackendUnavailableError, CollectiveTimeoutError

_Result = TypeVar("_Result")
_Results = queue.SimpleQueue[tuple[int, Any, "BaseException | None"]]
_SECONDS = 3600.0
"""How long a replica waits for the others, and a call for all. A caller's own limit comes long before."""
_DID_NOT_COME = (threading.BrokenBarrierError, CollectiveTimeoutError)
_made: Replicas | None = None


def replicas_of(degree: int) -> Replicas:
    """The replicas of this process. Raises BackendUnavailableError where it has others, or none can be had."""
    global _made
    if _made is None:
        _made = Replicas(degree)
    if _made.degree != degree:
        raise BackendUnavailableError(
            f"this process runs a model of degree {_made.degree} on XLA's devices, which are counted once, and the "
            f"artifact is of degree {degree}: load it in another process"
        )
    return _made


class Replicas:
    """Runs a function on all replicas at once. What raises on one of several ends the use of all."""

    def __init__(self, degree: int):
        self.degree = degree
        os.environ.update(torch_xla_environment(degree))
        from nxd_infer.backends.hlo import xla_api  # imports torch_xla, which reads the environment

        self._xla = xla_api
        self.devices = self._xla.replicate(degree)[:degree]
        if len(self.devices) < degree:
            raise BackendUnavailableError(
                f"torch_xla was started in this process before, with {len(self.devices)} devices, and the artifact "
                f"needs {degree}: load it before torch_xla is imported, or in another process"
            )
        self._all = threading.Barrier(degree)
        self._turn = threading.Lock()  # models of degree 1 share a process, and may be called by several threads
        self._work: list[queue.SimpleQueue[tuple[Callable[[int], Any], _Results]]] = [
            queue.SimpleQueue() for _ in self.devices
        ]
        for rank in range(degree):  # daemons: torch_xla's own pool would keep the interpreter from ending
            threading.Thread(target=self._live, args=(rank,), name=f"nxd-replica-{rank}", daemon=True).start()

    def run(self, work: Callable[[int], _Result], seconds: float | None = _SECONDS) -> list[_Result]:
        """``work(rank)`` of every replica, in its own thread. Returns when all are done, and raises what one raised."""
        results: _Results = queue.SimpleQueue()  # one of its own: what an interrupted call left undone goes nowhere
        with self._turn:
            for each in self._work:
                each.put((work, results))
            done = [results.get(timeout=seconds) for _ in self._work]
        errors = [error for _, _, error in done if error is not None]
        if errors:  # the others' only say that this one did not come
            raise next((error for error in errors if not isinstance(error, _DID_NOT_COME)), errors[0])
        return [result for _, result, _ in sorted(done, key=lambda entry: entry[0])]

    def step(self) -> None:
        """Run what this replica has recorded, with the others, and wait until all are done."""
        self._xla.step()
        self._all.wait(_SECONDS)
        self._xla.wait()
        self._all.wait(_SECONDS)

    def _live(self, rank: int) -> None:
        self._xla.use_device(self.devices[rank])
        with torch.no_grad():
            while True:
                work, results = self._work[rank].get()
                try:
                    results.put((rank, work(rank), None))
                except BaseException as error:
                    if self.degree > 1:  # the others may be in the middle of it
                        self._all.abort()
                    results.put((rank, None, error))
                del work, results  # with what they hold
