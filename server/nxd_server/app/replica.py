"""One copy of a model: its ranks, its engine, and the thread that starts them and follows the engine.

The engine restarts lost ranks itself; a copy whose ranks take longer than ``recovery`` allows, or cannot be kept alive,
is given up.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from typing import TYPE_CHECKING

from nxd_infer.errors import NxdError, RankFailedError
from nxd_server.engine.rank_restarts import RecoveryTimeout
from nxd_server.errors import log_failure, summary

if TYPE_CHECKING:
    from nxd_infer.runtime.rank_model import RankModel
    from nxd_infer.runtime.ranks import RankHealth
    from nxd_server.app.service import Service
    from nxd_server.engine import Engine, EngineHealth, OneShotEngine, TextEncoder

logger = logging.getLogger("nxd_server.service")

WATCH_SECONDS = 0.2


class Replica:
    """Copy number ``index`` of the model of ``service``."""

    def __init__(self, service: Service, index: int):
        self.index = index
        self.model: RankModel | None = None
        self.draft: RankModel | None = None
        self.engine: Engine | OneShotEngine | None = None
        self.encoder: TextEncoder | None = None
        """Of an encoder of texts, once there is an engine."""
        self.load_seconds: float | None = None
        self.failure: str | None = None
        """Why it can never be ready again."""
        self.recovery = RecoveryTimeout(service.settings.recovery_timeout)
        self._service = service
        self._stage = ""
        self._closing = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"nxd-replica-{index}", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def _run(self) -> None:
        try:
            self._load()
        except BaseException as error:  # nothing ends this thread without a word
            if not self._closing:
                self.fail(cannot_serve(error))
            return
        self._watch()

    def _load(self) -> None:
        begin = time.monotonic()
        service = self._service
        model, draft = service.make_model(), service.make_draft()
        with self._lock:
            self.model, self.draft = model, draft
            if self._closing:
                return
        model.start()
        if draft is not None:
            draft.start()
        service.wait_text(model)
        if self._closing:
            return
        self.engine = worker = service.make_engine(model, draft)
        self.encoder = service.make_encoder(worker)  # it needs an engine
        worker.start(on_progress=self._progress)
        gc.freeze()  # with torch loaded, a full collection stopped every thread for 0.2 s
        self.load_seconds = time.monotonic() - begin
        self.recovery.started(self.load_seconds, model.bounds)
        worker.restarts.bounded = True  # by this thread
        if not self._closing:
            logger.info("ready after %.1f s: %s", self.load_seconds, self)

    def __str__(self) -> str:
        service = self._service
        which = f" (copy {self.index})" if len(service.replicas) > 1 else ""
        return f"{service.model_name}{which}"

    def _progress(self, done: int, total: int, bucket: str) -> None:
        rest = f", next {bucket}" if bucket else "; the others run when they are needed" if done < total else ""
        self._stage = f"warmed up {done} of {total} graphs{rest}"
        logger.info("%s: %s", self, self._stage)

    def _watch(self) -> None:
        """Wait for the engine to recover, but no longer than the limit."""
        worker = self.engine
        while worker is not None and not self._closing:
            if worker.wait_failed(WATCH_SECONDS):
                self.fail(worker.verdict)
                return
            restarts, stage = worker.restarts, worker.restarts.stage
            if restarts.took is not None:
                self.recovery.took(restarts.took)  # repeating the same value has no effect
            if stage and (restarts.seconds or 0.0) > self.recovery.limit:
                self.fail(self.recovery.late(stage))
                return

    def fail(self, reason: str) -> None:
        """Give this copy up."""
        self.failure = reason
        self._service.lost(self)
        if self._service.failure is None:  # others go on: its ranks hold memory and cores, and may still be starting
            self.close()

    def close(self) -> None:
        """End it; running requests fail. The ranks have exited when this returns."""
        with self._lock:
            self._closing = True
        worker, models = self.engine, [one for one in (self.model, self.draft) if one is not None]
        starting = worker is None or worker.state in ("starting", "recovering", "failed")
        if worker is not None:
            worker.close(0.0 if starting else 5.0)
        for model in models:
            model.close()  # only this ends a start that the engine's thread may be waiting for
        if worker is not None:
            worker.close(5.0)

    # --- state ------------------------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        """Whether a request may be queued. (The engine itself ends a stalled step.)"""
        return self.failure is None and self.engine is not None and self.engine.state == "ready"

    @property
    def stuck(self) -> bool:
        """Whether a step is overdue."""
        return self.engine is not None and bool(self.engine.steps.overdue)

    @property
    def stalls(self) -> bool:
        """Whether a new request would wait for what other copies need not wait for: new weights, or a stuck step."""
        return self.stuck or (self.engine is not None and self.engine.gate.closed)

    def health(self) -> EngineHealth | None:
        return None if self.engine is None else self.engine.health()

    def ranks(self) -> list[RankHealth]:
        """Return every rank's health, even before the engine exists."""
        if (health := self.health()) is not None:
            return health.ranks
        return [] if self.model is None else self.model.health()

    def readiness(self) -> tuple[bool, str, str]:
        """Return whether a request sent now would be served, the state, and the reason if not."""
        if self.failure is not None:
            return False, "failed", self.failure
        health = self.health()
        if health is None or health.state == "starting":
            return False, "starting", self._stage or self._service.stage
        if health.recovering_for is not None:
            return False, health.state, self.recovery.progress(health.recovering_for, health.stage)
        if not health.ready:
            return False, health.state if health.state != "ready" else "stalled", health.reason
        for rank in health.ranks:
            if rank.state != "running" or not rank.alive:
                return False, "stalled", f"not every rank is running: rank {rank.rank} {rank.state}"
        return True, "ready", ""


def cannot_serve(error: BaseException) -> str:
    """Log why an artifact cannot be served; return it for a client."""
    foreseen = isinstance(error, RankFailedError) and error.foreseen
    if not foreseen and not (isinstance(error, NxdError) and summary(error) == str(error)):
        log_failure(logger, "the artifact cannot be served", error)  # the ranks' output is for the log only
    return f"the artifact cannot be served: {summary(error) or type(error).__name__}"
