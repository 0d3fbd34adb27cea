"""The model as the engine sees it: one without torch where that will do, whose slow steps are taken for stuck."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nxd_infer.trace.artifact import LoadedArtifact
    from nxd_infer.trace.rank_model import PendingStep, RankModel

SLOW_FACTOR = 10.0
"""A step may take this many times the slowest one measured, and at least ``call_timeout``."""


class BoundedModel:
    """The model as the engine sees it: every call is bounded by what calls have taken before.

    A graph's first run reads its weights from disk and may take as long as a start; later ones are stuck long before.
    (New weights are read while they are swapped in, so that no run does it.)
    """

    def __init__(self, model: RankModel, call_timeout: float, start_timeout: float):
        self._model = model
        self._call_timeout = call_timeout
        self._start_timeout = start_timeout
        self._seen: set[str] = set()
        self._slowest = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def run_bucket(self, name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """As :meth:`RankModel.run_bucket`, with the bound of this moment."""
        begin = time.monotonic()
        outputs = self._model.run_bucket(name, inputs, timeout=self._limit(name))
        self._learn(name, time.monotonic() - begin)
        return outputs

    def begin_bucket(self, name: str, inputs: Mapping[str, Any], *, checked: bool = False) -> BoundedStep:
        """As :meth:`RankModel.begin_bucket`, with the bound of this moment."""
        begun = self._model.begin_bucket(name, inputs, timeout=self._limit(name), checked=checked)
        return BoundedStep(begun, name, self)

    def _limit(self, name: str) -> float:
        return max(self._call_timeout, SLOW_FACTOR * self._slowest) if name in self._seen else self._start_timeout

    def _learn(self, name: str, seconds: float) -> None:
        if name in self._seen:
            self._slowest = max(self._slowest, seconds)
        self._seen.add(name)

    def restart(self) -> None:
        self._seen.clear()
        self._model.restart()


class BoundedStep:
    """A step that a :class:`BoundedModel` has begun."""

    def __init__(self, pending: PendingStep, name: str, model: BoundedModel):
        self._pending, self._name, self._model = pending, name, model

    def result(self, copy: bool = True) -> dict[str, Any]:
        outputs = self._pending.result(copy)
        self._model._learn(self._name, self.seconds)
        return outputs

    @property
    def seconds(self) -> float:
        return self._pending.seconds


def make_model(artifact: LoadedArtifact, spawned: threading.Event, **options: Any) -> RankModel:
    """The model of ``artifact``, whose files are not hashed yet; ``spawned`` is set when its ranks' processes run.

    The engine that generates makes no tensors: its server imports no torch, and hashes while the ranks do.
    """
    from nxd_infer.trace.rank_model import RankModel, takes_arrays

    def before_load() -> None:
        spawned.set()
        artifact.verify()

    if artifact.manifest.metadata.get("task") == "generate" and takes_arrays(artifact.manifest):
        return RankModel(artifact, before_load=before_load, **options)
    before_load()
    from nxd_infer.trace.model import TensorParallelModel

    return TensorParallelModel(artifact, in_process=False, **options)
